"""Whole records of small files, with the types that their values have, for what is no training text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import IO, Any

from megatron.extensions.text_data.formats import READERS, Reading, Unreadable, arrow_reader, format_of, seekable
from megatron.extensions.text_data.inputs import TextFile
from megatron.extensions.text_data.streams import Damaged, decompressed, opened


def read_rows(file: TextFile) -> list[dict[str, Any]]:
    """All records of JSON lines, a JSON array, CSV, TSV, Parquet or Arrow; of plain text the lines, as {"text": line}.

    Raises ValueError that names the file where it is damaged or is not what its name says.
    """
    kind = file.format or "jsonl"
    try:
        with opened(file.path) as raw, decompressed(raw, file.compression) as stream:
            rows = list(_rows(stream, format_of(file, stream)))
    except Damaged as error:
        raise ValueError(f"{file.path}: damaged: {error}; get the file again") from None
    except ImportError as error:
        raise ValueError(f"{file.path} needs a package ({error}): pip install pyarrow") from None
    except (OSError, csv.Error, ValueError, Unreadable) as error:
        raise ValueError(f"{file.path}: cannot be read: {error}") from None
    except Exception as error:  # those of other readers, as UnicodeError is a ValueError
        raise ValueError(f"{file.path}: cannot be read as {kind}: {error}") from None
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{file.path}: record {number} is not a JSON object")
    return rows


def _rows(stream: IO[bytes], kind: str) -> Iterator[Any]:
    if kind == "parquet":
        import pyarrow.parquet as pq

        yield from pq.read_table(seekable(stream)).to_pylist()
    elif kind == "arrow":
        yield from arrow_reader(seekable(stream)).read_all().to_pylist()
    elif kind == "json":
        yield from READERS["json"][1](stream, Reading())
    else:
        yield from _lines(io.TextIOWrapper(stream, "utf-8-sig", newline=""), kind)


def _lines(text: io.TextIOWrapper, kind: str) -> Iterator[Any]:
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
