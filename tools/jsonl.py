"""Read lines of plain, gzip or zstd text files, with file name and line number."""

from __future__ import annotations

import glob
import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Chunk:
    """Lines that follow one another in a file."""

    path: str
    first_line: int
    """Number of the first of them, counted from 1."""

    lines: list[bytes]
    consumed: int
    """Bytes of the file as it is on disk, read up to the end of the chunk."""

    @property
    def size(self) -> int:
        return sum(map(len, self.lines))


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """Files and globs as a list of files: in the order given, those of a glob sorted, none twice.

    Raises ValueError with every pattern that names no file.
    """
    found: dict[Path, None] = {}
    problems = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            problems.append(f"--input {pattern} is a folder; name its files, as '{pattern.rstrip('/')}/*.jsonl'")
            continue
        matches = [pattern] if path.exists() else sorted(glob.glob(pattern, recursive=True))
        files = [Path(match) for match in matches if not Path(match).is_dir()]
        if not files:
            problems.append(f"--input {pattern}: there is no such file; the path is taken from {Path.cwd()}")
        found.update(dict.fromkeys(files))
    if problems:
        raise ValueError("\n".join(problems))
    return list(found)


def read_chunks(paths: Sequence[Path], chunk_bytes: int) -> Iterator[Chunk]:
    """Lines of all files, in order, about `chunk_bytes` at a time.

    Raises ValueError naming file and line where a compressed file is damaged.
    """
    for path in paths:
        number, first, size, lines = 0, 1, 0, list[bytes]()
        with open(path, "rb") as raw, _decompressed(path, raw) as stream:
            try:
                for line in stream:
                    number += 1
                    lines.append(line.removeprefix(BOM) if number == 1 else line)
                    size += len(line)
                    if size >= chunk_bytes:
                        yield Chunk(str(path), first, lines, _position(raw))
                        first, size, lines = number + 1, 0, []
            except _damage() as error:
                raise ValueError(f"{path}: damaged after line {number}: {error}; get the file again") from None
            if lines:
                yield Chunk(str(path), first, lines, _position(raw))


def parse_line(line: bytes, keys: Sequence[str]) -> list[str]:
    """The texts of these keys in a line of JSON. Raises ValueError that says what is wrong with it."""
    try:
        record: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: byte {error.start} of the line is 0x{line[error.start]:02x}") from None
    except RecursionError:
        raise ValueError("JSON nested too deep") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object but {_type_name(record)}")
    texts = []
    for key in keys:
        if key not in record:
            has = ", ".join(map(repr, list(record)[:8])) or "none"
            raise ValueError(f"no key {key!r} (--json-keys); the keys are {has}")
        if not isinstance(record[key], str):
            raise ValueError(f"{key!r} is not text but {_type_name(record[key])}")
        texts.append(record[key])
    return texts


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", type(None): "null", str: "text"}
    return names.get(type(value), "a number")


@contextmanager
def _decompressed(path: Path, raw: IO[bytes]) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        with gzip.open(raw) as stream:
            yield stream
    elif path.suffix == ".zst":
        import io

        try:
            import zstandard
        except ImportError:
            raise ValueError(f"--input {path} needs the package zstandard: pip install zstandard") from None
        with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as reader:
            yield io.BufferedReader(reader, 1 << 20)
    else:
        yield raw


def _position(raw: IO[bytes]) -> int:
    return raw.tell() if raw.seekable() else 0  # a pipe has no position


def _damage() -> tuple[type[Exception], ...]:
    kinds: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile)
    try:
        import zlib

        import zstandard

        return (*kinds, zlib.error, zstandard.ZstdError)
    except ImportError:
        return kinds
