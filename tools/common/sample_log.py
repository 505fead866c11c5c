"""Read a --sample-log file, which records the samples of each training step."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.json_text import parse_json
from megatron.core.datasets.indexed_dataset import IndexedDataset

WITHOUT_DOCUMENTS = (
    "the samples of this step are not from documents: --mock-data or another --dataset-type made them, so they cannot "
    "be decoded; --sample-log has only their origins and checksums"
)
"""Error message for samples that do not belong to a given data set, if the log does not list their documents either."""


def record_of_step(log: Path, step: int) -> dict[str, Any]:
    """Return the record of a step. Raises ValueError if the log does not contain this step."""
    steps, number = list[int](), 0
    try:
        with open(log, encoding="utf-8") as stream:
            for line in stream:
                number += 1
                record = parse_json(line)
                steps.append(record["iteration"])
                if record["iteration"] == step:
                    return dict(record)
    except OSError as error:
        raise ValueError(f"--sample-log {log}: {error.strerror}; give the file of a run's --sample-log") from None
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"--sample-log {log}: line {number} is not a record of --sample-log") from None
    known = f"it has steps {min(steps)} to {max(steps)}" if steps else "it is empty"
    raise ValueError(f"--step {step}: {log} has no such step; {known}")


def lines_of_step(
    record: Mapping[str, Any], prefixes: Mapping[str, str], decode: Callable[[NDArray], str] | None
) -> Iterator[str]:
    """Yield lines about each sample of a step: the decoded text of its parts, and whether its tokens are the same as in
    training.

    `prefixes` maps each data set name in the log to the prefix of an indexed dataset. Raises ValueError for an unknown
    name.
    """
    opened: dict[str, IndexedDataset] = {}
    yield f"step {record['iteration']}: samples {record['samples'][0]} to {record['samples'][1]}"
    rows = zip(
        record["origins"], record.get("documents") or [[]] * len(record["origins"]), record["crc32"], strict=True
    )
    for number, (origin, parts, checksum) in enumerate(rows, record["samples"][0]):
        name = origin.rpartition(":")[0]
        if name not in prefixes and not parts and "documents" in record:
            raise ValueError(WITHOUT_DOCUMENTS)
        if name not in prefixes:
            given = ", ".join(prefixes) or "none"
            raise ValueError(
                f"the log names the data set {name}, but the given ones are {given}; give all with --data-path"
            )
        dataset = opened.setdefault(name, IndexedDataset(prefixes[name]))
        try:
            ids = [dataset.get(document, start, start + count) for document, start, count in parts]
        except IndexError:
            raise ValueError(
                f"{prefixes[name]} has too few documents for sample {number}; give the run's data"
            ) from None
        yield f"sample {number}, {origin}{_doubt(ids, checksum)}"
        for (document, start, count), tokens in zip(parts, ids, strict=True):
            yield f"  document {document}, tokens {start} to {start + count - 1}"
            yield f"    {decode(tokens)!r}" if decode is not None else f"    {tokens.tolist()}"


def _doubt(ids: list[NDArray], checksum: str) -> str:
    """Return a message if the tokens do not match the checksum in the log."""
    if not ids:
        return ": the log does not say which documents it has"
    text = np.concatenate(ids).astype(np.int64)[:-1]
    if f"{zlib.crc32(text.tobytes()):08x}" == checksum:
        return ""
    return ": these are not the tokens that were trained on (other data, or a sample rearranged by --fim-data)"
