"""Whole records of small files, with the types that their values have, for what is no training text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import IO, Any

from megatron.extensions.text_data.formats import MAGIC, READERS, Reading
from megatron.extensions.text_data.inputs import TextFile
from megatron.extensions.text_data.streams import Damaged, decompressed, opened


def read_rows(file: TextFile) -> list[dict[str, Any]]:
    """All records of JSON lines, a JSON array, CSV, TSV, Parquet or Arrow; of plain text the lines, as {"text": line}.

    Raises ValueError that names the file where it is damaged or is not what its name says.
    """
    kind = file.format or "jsonl"
    try:
        with opened(file.path) as raw, decompressed(raw, file.compression) as stream:
            rows = list(_rows(stream, kind))
    except Damaged as error:
        raise ValueError(f"{file.path}: damaged: {error}; get the file again") from None
    except ImportError as error:
        raise ValueError(f"{file.path} needs a package ({error}): pip install pyarrow") from None
    except (OSError, csv.Error, ValueError) as error:
        raise ValueError(f"{file.path}: cannot be read: {error}") from None
    except Exception as error:  # those of other readers, as UnicodeError is a ValueError
        raise ValueError(f"{file.path}: cannot be read as {kind}: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{file.path}: record {number} is not a JSON object")
    return rows


def _rows(stream: IO[bytes], kind: str) -> Iterator[Any]:
    if kind in ("parquet", "arrow"):
        yield from _table(stream, kind)
        return
    start = stream.peek(16)  # type: ignore[attr-defined]
    for magic, what in MAGIC.items():
        if start.startswith(magic):
            raise ValueError(f"this looks like {what}")
    if kind == "json" and start.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from READERS["json"][1](stream, Reading())
        return
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    try:
        if kind in ("csv", "tsv"):
            yield from csv.DictReader(text, delimiter="," if kind == "csv" else "\t", strict=True)
            return
        for number, line in enumerate(text, 1):
            if kind == "text":
                yield {"text": line.rstrip("\r\n")}
            elif line.strip():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from None
    finally:
        text.detach()


def _table(stream: IO[bytes], kind: str) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    source = io.BytesIO(stream.read())
    if kind == "parquet":
        return pq.read_table(source).to_pylist()
    is_file = source.read(6) == b"ARROW1"
    source.seek(0)
    reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
    return reader.read_all().to_pylist()
