"""Input files given by paths, globs, folders or URLs, and their decompressed bytes. An error is raised for every
damaged file.

Python's readers of bz2 and xz drop everything after a damaged stream, and a zstd reader may end silently in the middle
of a frame. The readers in this module raise `Damaged` if the file does not end with a complete stream.
"""

from __future__ import annotations

import bz2
import glob
import io
import logging
import lzma
import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Protocol

from megatron.training.reliability.url_credentials import like, redacted, take_credentials, with_credentials

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
    from fsspec import AbstractFileSystem

INPUT_BYTES = 1 << 16
BUFFER_BYTES = 1 << 20
ZSTD_WINDOW = 1 << 31
"""Maximum zstd window size in bytes, which is the limit of `zstd --long=31`. The zstandard library allows only 128 MB
by default."""


class Damaged(Exception):
    """Raised if a compressed stream cannot be read to its end."""


class _Decompressor(Protocol):
    """Single-stream decompressor with the interface of zlib, bz2, lzma and zstandard."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _zstd() -> _Decompressor:
    import zstandard

    stream: _Decompressor = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()
    return stream


COMPRESSIONS: dict[str, Callable[[], _Decompressor]] = {
    ".gz": lambda: zlib.decompressobj(31),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lzma.LZMADecompressor,
    ".zst": _zstd,
}
"""Maps file name suffixes to functions that create a decompressor. A decompressor handles one compressed stream; a file
of several concatenated streams needs a new decompressor for each stream."""


class _Decompressed(io.RawIOBase):
    """Readable file that decompresses one or more concatenated streams. Reading raises `Damaged` if a stream is damaged
    or truncated."""

    def __init__(self, raw: IO[bytes], suffix: str) -> None:
        self._raw, self._suffix = raw, suffix
        self._stream: _Decompressor | None = None
        """Decompressor of the current stream, or None between two streams."""

        self._ready = memoryview(b"")
        self._read_any = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        into = memoryview(buffer).cast("B")
        while not self._ready:
            piece = self._raw.read(INPUT_BYTES)
            if not piece:
                if self._stream is not None or not self._read_any:
                    raise Damaged(f"the {self._suffix[1:]} stream is cut off")
                return 0
            self._read_any = True
            self._ready = memoryview(b"".join(self._decompress(piece)))
        count = min(len(into), len(self._ready))
        into[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:
                data = data.lstrip(b"\0") if self._suffix in (".gz", ".xz") else data  # padding between streams
                if not data:
                    return
                self._stream = COMPRESSIONS[self._suffix]()
            try:
                yield self._stream.decompress(data)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise Damaged(str(error)) from None
            except Exception as error:
                # Zstandard is optional, so its exception class ZstdError cannot be imported and is recognized by name.
                if type(error).__name__ != "ZstdError":
                    raise
                raise Damaged(str(error)) from None
            data = self._stream.unused_data if self._stream.eof else b""
            if self._stream.eof:
                self._stream = None


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """Open a local or remote file without decompressing it. Raises OSError if the file cannot be opened, and ValueError
    if a package for the URL is missing."""
    if "://" in path:
        filesystem, inside = remote(path)
        with filesystem.open(inside, "rb") as stream:
            yield io.BufferedReader(stream, BUFFER_BYTES)
    else:
        with open(path, "rb") as stream:
            yield stream


def decompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """Decompress the stored file `raw`. `suffix` is the compression suffix of the file name, or "" if the file is not
    compressed."""
    if suffix not in COMPRESSIONS:
        return raw
    if suffix == ".zst":
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise ValueError("a .zst file needs the package zstandard: pip install zstandard") from None
    return io.BufferedReader(_Decompressed(raw, suffix), BUFFER_BYTES)


def remote(url: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL, such as s3://bucket/key, and the path in this file system. Raises ValueError if
    no package supports the URL."""
    scheme = url.partition("://")[0]
    try:
        import fsspec

        return fsspec.core.url_to_fs(with_credentials(url))
    except ImportError as error:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}.get(scheme, "fsspec")
        raise ValueError(f"{url}: {scheme}:// needs a package ({error}): pip install {package}") from None
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from None


logger = logging.getLogger(__name__)

SHOWN = 5
"""Maximum number of files that a message lists."""

WEB = ("http://", "https://")
"""Prefixes of URLs in which a question mark begins the query string."""

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Maps file name suffixes to file formats. The formats are keys of
`megatron.extensions.data.text_data.formats.READERS`."""


@dataclass(frozen=True)
class TextFile:
    """Input file from which documents are read."""

    path: str
    """Path or URL."""

    format: str | None
    """File format, or None if the file name does not determine the format."""

    compression: str
    """Compression suffix, a key of `COMPRESSIONS`; "" if the file is not compressed."""

    size: int
    """Size of the stored file in bytes."""

    modified: str
    """Value that changes whenever the file changes: the modification time of a local file, or the state that a remote
    store reports."""

    @property
    def remote(self) -> bool:
        return "://" in self.path


def by_name(path: str) -> tuple[str | None, str]:
    """Return the format and compression that a file name implies: "a.jsonl.gz" gives ("jsonl", ".gz")."""
    place = path.partition("?")[0] if path.startswith(WEB) else path
    suffixes = [suffix.lower() for suffix in PurePosixPath(place).suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return (FORMATS.get(suffixes[-1]) if suffixes else None), compression


def is_text(path: str) -> bool:
    """Return True if a path has a known suffix, or if it is a folder that contains non-hidden files with known
    suffixes."""
    if not os.path.isdir(path):
        return by_name(path)[0] is not None
    names = (os.path.basename(file) for file in files_below(path))
    return any(by_name(name)[0] is not None for name in names if not name.startswith("."))


def files_below(folder: str, left_out: Callable[[str, str], None] = lambda link, target: None) -> Iterator[str]:
    """Yield all files below a folder, including files in folders that symbolic links point to.

    If several paths lead to the same folder, the folder is visited once, preferably by a path without symbolic links.
    For each other path to the folder, `left_out` is called with two arguments: the path that is skipped and the path
    that was visited."""
    seen: dict[tuple[int, int], str] = {}
    links = deque([folder])
    while links:
        for at, folders, names in os.walk(links.popleft()):
            state = os.stat(at)
            if (first := seen.setdefault((state.st_dev, state.st_ino), at)) != at:
                left_out(at, first)
                folders.clear()
                continue
            inside = (os.path.join(at, name) for name in sorted(folders))
            links += (path for path in inside if os.path.islink(path))
            yield from (os.path.join(at, name) for name in names)


@cache
def _say_left_out(link: str, target: str) -> None:
    logger.warning("%s left out: it is the folder %s, whose files are already included", link, target)


def find_inputs(patterns: Sequence[str], flag: str = "--input") -> list[TextFile]:
    """Return the files given by paths, globs, folders and URLs, in the given order and without duplicates. Files of a
    glob or folder are sorted.

    For a folder, all non-hidden files of known formats below it are returned. Raises a ValueError that lists every
    pattern without files.
    """
    found: dict[str, TextFile] = {}
    problems = []
    for pattern in map(take_credentials, patterns):
        try:
            files = list(_remote_files(pattern) if "://" in pattern else _local_files(pattern))
        except Exception as error:
            # For URLs, every exception is caught, because each storage library raises its own exception classes.
            if "://" not in pattern and not isinstance(error, (ValueError, OSError)):
                raise
            problems.append(f"{flag} {pattern}: {redacted(str(error)).removeprefix(f'{pattern}: ')}")
            continue
        if not files:
            where = "" if "://" in pattern else f"; the path is relative to {Path.cwd()}"
            problems.append(f"{flag} {pattern}: there is no such file{where}")
        for file in files:
            found.setdefault(file.path, file)
    if problems:
        raise ValueError("\n".join(problems))
    return list(found.values())


def _local_files(pattern: str) -> Iterator[TextFile]:
    if os.path.isdir(pattern):
        kept = sorted(_known(list(files_below(pattern, _say_left_out)), pattern))
    else:
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        kept = sorted(match for match in matches if not os.path.isdir(match))
    for path in kept:
        state = os.stat(path)
        yield TextFile(path, *by_name(path), state.st_size, str(state.st_mtime_ns))


def _remote_files(url: str) -> Iterator[TextFile]:
    filesystem, inside = remote(url)
    wildcards = "*[" if url.startswith(WEB) else "*?["
    if any(letter in inside for letter in wildcards):
        paths = [path for path in filesystem.glob(inside) if not filesystem.isdir(path)]
    elif filesystem.isdir(inside):
        paths = list(_known(filesystem.find(inside), url))
    else:
        paths = [inside] if filesystem.exists(inside) else []
    for path in sorted(paths):
        state = filesystem.info(path)
        modified = next((str(state[key]) for key in ("ETag", "etag", "mtime", "LastModified") if key in state), "")
        found, size = like(url, filesystem.unstrip_protocol(path)), int(state.get("size") or 0)
        yield TextFile(found, *by_name(path), size, modified)


def _known(paths: Sequence[str], folder: str) -> Iterator[str]:
    """Yield the files in `paths` whose suffix is a known format. Raises ValueError if there are no such files."""
    inside = [path.removeprefix(folder) for path in paths]
    shown = [path for path, place in zip(paths, inside, strict=True) if "/." not in f"/{place}"]
    known = [path for path in shown if by_name(path)[0] is not None]
    if not known:
        suffixes = ", ".join(FORMATS)
        raise ValueError(f"no file in the folder has a known suffix ({suffixes}); name files, such as '{folder}/*'")
    others = sorted(set(shown) - set(known))
    if others:
        files = "1 file" if len(others) == 1 else f"{len(others)} files"
        some = ", ".join(map(os.path.basename, others[:SHOWN])) + (", ..." if len(others) > SHOWN else "")
        logger.warning("%s: left out %s of unknown format: %s", folder, files, some)
    yield from known
