"""Readers that yield the documents of a file in chunks, with memory use that does not grow with the file size.

Readers yield most records as undecoded bytes; `texts_of` decodes these bytes in the process that tokenizes them. If a
single record is invalid, only this record is affected. If the rest of a file cannot be read, an error with the file
name is raised."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import IO, TYPE_CHECKING

from megatron.extensions.data.text_data.inputs import Damaged, TextFile, decompressed, opened
from megatron.extensions.data.text_data.json_values import from_json, is_indented, next_value

if TYPE_CHECKING:
    import pyarrow as pa

BOM = codecs.BOM_UTF8
ROWS, ROWS_BYTES = 1024, 1 << 20
"""`ROWS` is the number of table rows that are read at once. `ROWS_BYTES` is the number of bytes per chunk in
`read_rows`."""

LONGEST_ESCAPE = 16
"""Maximum length of a JSON escape sequence, in characters. A JSON error this close to the end of the text read so far
may be caused by an incomplete escape sequence. In this case, more text is read before the error is reported."""

Record = bytes | tuple[bytes | str | None, ...] | dict[str, object] | ValueError
"""Content of a record. A line is represented as bytes. Selected values are a tuple with one value per key. A JSON
object or a whole table row is a dict. An invalid record is the ValueError that describes the error."""


@dataclass(frozen=True)
class Reading:
    """Settings that determine how documents are read from files."""

    keys: tuple[str, ...] = ("text",)
    """JSON keys or table columns that contain documents. If the tuple is empty, whole rows are read."""

    text_documents: str = "file"
    """Unit of a document in a plain text file: "file" or "line"."""

    flag: str = "--json-keys"
    """Name of the flag that sets the keys, for error messages."""


@dataclass(frozen=True)
class Chunk:
    """Group of consecutive records of one file."""

    path: str
    unit: str
    """Word for a record in messages: "line", "row", "record" or "document"."""

    first: int
    """Number of the chunk's first record in the file, starting at 1."""

    records: list[Record]
    size: int
    """Approximate size of all records in the chunk, in bytes."""

    consumed: int
    """Number of bytes of the stored (possibly compressed) file that had been read when the chunk was complete."""

    of_json: bool
    """True if each line of the file is a JSON value."""


def read_chunks(files: Iterable[TextFile], reading: Reading, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the records of all files, in order, in chunks of about `chunk_bytes` bytes. `reading` determines how
    records are read.

    Raises ValueError with the file name and the position if a file is damaged or does not have the format that its name
    implies.
    """
    for file in files:
        number, unit = 0, "record"
        try:
            with opened(file.path) as raw, decompressed(raw, file.compression) as stream:
                kind = format_of(file, stream)
                unit, read = READERS[kind]
                position = raw.tell if raw.seekable() and not raw.closed else int
                records = list[Record]()
                size = 0
                first = 1
                for record in read(stream, reading):
                    number += 1
                    records.append(record)
                    size += _size(record)
                    if size >= chunk_bytes:
                        yield Chunk(file.path, unit, first, records, size, position(), kind in ("jsonl", "json"))
                        records = []
                        size = 0
                        first = number + 1
                if records:
                    yield Chunk(file.path, unit, first, records, size, position(), kind in ("jsonl", "json"))
        except Damaged as error:
            raise ValueError(f"{file.path}: damaged after {unit} {number}: {error}; get the file again") from None
        except ImportError as error:
            raise ValueError(f"{file.path} needs a package ({error}): pip install pyarrow") from None
        except UnicodeDecodeError as error:
            found = f"not UTF-8: byte 0x{error.object[error.start]:02x}; {_to_utf_8(error.object)}"
            raise ValueError(f"{file.path}: cannot be read after {unit} {number}: {found}") from None
        except (OSError, csv.Error, UnicodeError, Unreadable) as error:
            raise ValueError(f"{file.path}: cannot be read after {unit} {number}: {error}") from None


def texts_of(record: Record, chunk: Chunk, reading: Reading) -> list[str]:
    """Return the strings in a record, one for each key of `reading`. Raises ValueError if the record is invalid."""
    if isinstance(record, tuple):
        return [_text(value, key) for key, value in zip(reading.keys, record, strict=True)]
    row = _row(record, chunk)
    if isinstance(row, str):
        return [row]
    for key in reading.keys:
        if key not in row:
            has = ", ".join(map(repr, list(row)[:8])) or "none"
            raise ValueError(f"no key {key!r} ({reading.flag}); the keys are {has}")
    return [_text(row[key], key) for key in reading.keys]


def read_rows(file: TextFile) -> list[dict[str, object]]:
    """Return all rows of a small file as dicts whose values keep their types. A line of plain text is returned as
    {"text": line}.

    Raises ValueError with the file name and the position if the file is damaged or does not have the format that its
    name implies.
    """
    rows, reading = list[dict[str, object]](), Reading((), text_documents="line")
    for chunk in read_chunks([file], reading, ROWS_BYTES):
        for number, record in enumerate(chunk.records, chunk.first):
            if chunk.of_json and is_blank(record):
                continue
            try:
                row = _row(record, chunk)
            except ValueError as error:
                raise ValueError(f"{file.path}: {chunk.unit} {number}: {error}") from None
            rows.append({"text": row} if isinstance(row, str) else row)
    return rows


def _row(record: object, chunk: Chunk) -> str | dict[str, object]:
    """Return the string or the JSON object of a record. Raises ValueError if the record is invalid."""
    if isinstance(record, ValueError):
        raise record
    if isinstance(record, bytes):
        try:
            text = _decoded(record, f"the {chunk.unit}")
        except ValueError as error:
            raise ValueError(f"{error}; {_to_utf_8(record)}") from None
        if not chunk.of_json:
            return text
        try:
            record = from_json(text)
        except RecursionError:
            raise ValueError("not JSON: it nests too deeply") from None
        except ValueError as error:
            raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object, but {_type_name(record)}")
    return record


def is_blank(record: Record) -> bool:
    return isinstance(record, bytes) and not record.strip()


def _decoded(value: bytes, where: str) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} of {where} is 0x{value[error.start]:02x}") from None


def _to_utf_8(text: bytes) -> str:
    """Return a message that tells the user how to convert a file to UTF-8."""
    utf_16 = text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in text
    return f"convert files in a different encoding, such as with iconv -f {'UTF-16' if utf_16 else 'LATIN1'} -t UTF-8"


def _text(value: object, key: str) -> str:
    if isinstance(value, bytes):
        return _decoded(value, repr(key))
    if not isinstance(value, str):
        raise ValueError(f"{key!r} is not text, but {_type_name(value)}")
    return value


def _type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "text"}
    return names.get(type(value), "a number")


def _size(record: Record) -> int:
    if isinstance(record, bytes):
        return len(record)
    values = record.values() if isinstance(record, dict) else record if isinstance(record, tuple) else ()
    return sum(len(value) for value in values if isinstance(value, str | bytes))


class Unreadable(Exception):
    """Raised if the rest of a file cannot be read."""


LOOKS_LIKE = (
    (rb"PAR1\x15", "Parquet; name it .parquet"),
    (rb"ARROW1\0\0|\xff\xff\xff\xff", "Arrow; name it .arrow"),
    (rb"MMIDIDX\0\0", "an indexed dataset; pass its prefix to --data-path"),
    (rb"SQLite format 3\0", "a database; export it as JSON lines"),
    (rb"PK\x03\x04", "a zip archive; unpack it"),
    (rb"%PDF-\d\.\d\s", "a PDF; extract its text"),
    (rb"\x1f\x8b\x08", "compressed; name it .gz"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed; name it .bz2"),
    (rb"\xfd7zXZ\0", "compressed; name it .xz"),
    (rb"\x28\xb5\x2f\xfd", "compressed; name it .zst"),
)
"""Pairs of a pattern and a description of a file format. The pattern matches the first bytes of files in this format.
Letters alone are not sufficient, because a text may begin with them. Each pattern therefore also matches bytes that do
not occur in text, or the structure of the format's header."""


def format_of(file: TextFile, stream: IO[bytes]) -> str:
    """Return the format that a file's name implies. The default is JSON lines. A .json file whose content does not
    begin with an array is also read as JSON lines. Raises Unreadable if the beginning of `stream`, the file's content,
    has a different format."""
    kind = file.format or "jsonl"
    if kind in ("parquet", "arrow"):
        return kind
    start: bytes = stream.peek(1 << 16)  # type: ignore[attr-defined]
    for pattern, what in LOOKS_LIKE:
        if re.match(pattern, start):
            raise Unreadable(f"this looks like {what}")
    if kind == "json" and not start.removeprefix(BOM).lstrip().startswith(b"["):
        # Many files with the suffix .json contain JSON lines.
        kind = "jsonl"
    if kind == "jsonl" and is_indented(start.removeprefix(BOM)):
        raise Unreadable("a JSON object spans several lines; write one object per line, or an array in a .json file")
    return kind


def _lines(stream: IO[bytes], reading: Reading) -> Iterator[Record]:
    first = stream.readline()
    if first:
        yield first.removeprefix(BOM)
    yield from stream


def _text_file(stream: IO[bytes], reading: Reading) -> Iterator[Record]:
    if len(reading.keys) > 1:
        raise Unreadable(f"plain text has one document per record, but {reading.flag} names {len(reading.keys)} keys")
    if reading.text_documents == "line":
        for line in _lines(stream, reading):
            assert isinstance(line, bytes)
            yield line.removesuffix(b"\n").removesuffix(b"\r")
    else:
        yield stream.read().removeprefix(BOM)


def _json_array(stream: IO[bytes], reading: Reading) -> Iterator[Record]:
    """Yield the objects of the JSON array in `stream`. Each object is yielded as soon as it is complete."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    text = ""
    at = 0
    ended = False
    piece = 1 << 18

    def more() -> None:
        nonlocal text, at, ended, piece
        data = stream.read(piece)
        ended = not data
        text, at = text[at:] + decoder.decode(data, final=ended), 0
        # Read larger pieces if an element is long, so that the element is rescanned only a few times.
        piece = max(piece, len(text))

    def next_token() -> str:
        nonlocal at
        while True:
            while at < len(text) and text[at] in " \t\r\n":
                at += 1
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    next_token()
    # Skip the opening bracket.
    at += 1
    closing = next_token()
    while closing != "]":
        while True:
            try:
                value, end = next_value(text, at)
                if end < len(text) or ended:  # a number at the end of `text` may be incomplete
                    break
            except RecursionError:
                raise Unreadable("JSON is nested too deeply") from None
            except json.JSONDecodeError as error:
                open_string = error.msg.startswith("Unterminated string")
                if ended or (error.pos < len(text) - LONGEST_ESCAPE and not open_string):
                    raise Unreadable(f"not JSON: {error.msg}") from None
            more()
            next_token()
        at = end
        yield value if isinstance(value, dict) else ValueError(f"not a JSON object, but {_type_name(value)}")
        closing = next_token()
        if closing == ",":
            at += 1
            next_token()
        elif closing != "]":
            raise Unreadable(f"not a JSON array: {closing or 'the end'!r} where , or ] is expected")
    at += 1
    if rest := next_token():
        raise Unreadable(f"not JSON: {rest!r} after the end of the array")


def _csv(stream: IO[bytes], reading: Reading, delimiter: str = ",") -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")
    try:
        rows = csv.reader(text, delimiter=delimiter, strict=True)
        header = next(rows, None)
        if header is None:
            return
        places = _places(reading, header)
        for row in rows:
            if not row:
                continue
            if not reading.keys:
                yield dict(zip_longest(header, row))
            elif len(row) != len(header):
                yield ValueError(f"{len(row)} values, but the first row names {len(header)} columns")
            else:
                yield tuple(row[place] for place in places)
    finally:
        text.detach()


def _places(reading: Reading, names: Sequence[str]) -> list[int]:
    missing = [key for key in reading.keys if key not in names]
    if missing:
        has = ", ".join(map(repr, names[:8]))
        joined = len(names) == 1 and any(mark in names[0] for mark in ";\t|")
        remedy = "; .csv needs commas between values, .tsv tabs" if joined else ""
        raise Unreadable(f"no column {missing[0]!r} ({reading.flag}); the columns are {has}{remedy}")
    return [names.index(key) for key in reading.keys]


def _parquet(stream: IO[bytes], reading: Reading) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(_seekable(stream), page_checksum_verification=True)
        _places(reading, file.schema_arrow.names)
        yield from _columns(file.iter_batches(batch_size=ROWS, columns=list(reading.keys) or None), reading)
    except (pa.ArrowException, ValueError) as error:
        raise Unreadable(f"invalid Parquet file: {error}") from None


def _arrow(stream: IO[bytes], reading: Reading) -> Iterator[Record]:
    """Yield the records of an Arrow IPC file or stream."""
    import pyarrow as pa

    try:
        source = _seekable(stream)
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        _places(reading, reader.schema.names)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        slices = (batch.slice(start, ROWS) for batch in batches for start in range(0, batch.num_rows, ROWS))
        yield from _columns(slices, reading)
    except (pa.ArrowException, ValueError) as error:
        raise Unreadable(f"invalid Arrow file: {error}") from None


def _columns(batches: Iterable[pa.RecordBatch], reading: Reading) -> Iterator[Record]:
    """Yield table rows. Strings are yielded as bytes, because one string that is not valid UTF-8 would prevent the
    decoding of all rows of its batch."""
    for batch in batches:
        if not reading.keys:
            yield from batch.to_pylist()
            continue
        columns = []
        for key in reading.keys:
            column = batch.column(batch.schema.names.index(key))
            values = _text_bytes(column)
            if values is None:
                raise Unreadable(f"column {key!r} is not text, but {column.type}")
            columns.append(values.to_pylist())
        yield from zip(*columns, strict=True)


def _text_bytes(column: pa.Array) -> pa.Array | None:
    """Convert an Arrow array of strings, in any Arrow layout, to bytes. Return None if the array contains values other
    than strings.

    Lengths and offsets are validated, because an Arrow stream has no checksum for these values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):  # such as arrow.json
        return _text_bytes(column.storage)
    if pa.types.is_dictionary(kind):
        column.validate(full=True)
        values = _text_bytes(column.dictionary)
        return None if values is None else pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    if pa.types.is_run_end_encoded(kind):
        column.validate(full=True)
        return _text_bytes(pc.run_end_decode(column))
    layouts = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    if kind not in layouts:
        return None
    values = pa.Array.from_buffers(layouts[kind], len(column), column.buffers(), offset=column.offset)
    values.validate(full=True)
    return values.cast(pa.large_binary()) if kind == pa.string_view() else values


def _seekable(stream: IO[bytes]) -> IO[bytes]:
    """Return a seekable stream. A non-seekable stream, for example of a compressed file, is read into memory."""
    return stream if stream.seekable() else io.BytesIO(stream.read())


READERS: dict[str, tuple[str, Callable[[IO[bytes], Reading], Iterator[Record]]]] = {
    "jsonl": ("line", _lines),
    "json": ("record", _json_array),
    "text": ("document", _text_file),
    "csv": ("row", _csv),
    "tsv": ("row", partial(_csv, delimiter="\t")),
    "parquet": ("row", _parquet),
    "arrow": ("row", _arrow),
}
"""Maps each file format to a pair: the word for its records in messages, and the function that reads the records."""
