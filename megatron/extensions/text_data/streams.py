"""Bytes of local and remote files, decompressed, where every damage is an error.

Python's own readers of bz2 and xz leave out what follows a damaged stream, and a zstd reader ends quietly in the middle
of a frame. Here a file ends where its last stream is complete, or Damaged is raised.
"""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any

INPUT_BYTES = 1 << 16
BUFFER_BYTES = 1 << 20


class Damaged(Exception):
    """A compressed stream that cannot be read to its end."""


def _zstd() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor().decompressobj()


COMPRESSIONS: dict[str, tuple[Callable[[], Any], bytes]] = {
    ".gz": (lambda: zlib.decompressobj(31), b"\x1f\x8b"),
    ".bz2": (bz2.BZ2Decompressor, b"BZh"),
    ".xz": (lzma.LZMADecompressor, b"\xfd7zXZ\x00"),
    ".zst": (_zstd, b"\x28\xb5\x2f\xfd"),
}
"""Suffix -> what decompresses one stream, and the bytes that a file begins with."""


class _Decompressed(io.RawIOBase):
    """A file of one or more compressed streams, one after the other. Raises Damaged."""

    def __init__(self, raw: IO[bytes], suffix: str) -> None:
        self._raw, self._suffix = raw, suffix
        self._stream: Any = None
        """What decompresses the present one, as zlib, bz2, lzma and zstandard have it; None between two."""

        self._ready = memoryview(b"")
        self._read_any = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            piece = self._raw.read(INPUT_BYTES)
            if not piece:
                if self._stream is not None or not self._read_any:
                    raise Damaged(f"the {self._suffix[1:]} stream is cut off")
                return 0
            self._read_any = True
            self._ready = memoryview(b"".join(self._decompress(piece)))
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count

    def _decompress(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._stream is None:
                data = data.lstrip(b"\0") if self._suffix in (".gz", ".xz") else data  # padding between streams
                if not data:
                    return
                self._stream = COMPRESSIONS[self._suffix][0]()
            try:
                yield self._stream.decompress(data)
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise Damaged(str(error)) from None
            except Exception as error:  # zstandard has its own class, and may not be installed
                if type(error).__name__ != "ZstdError":
                    raise
                raise Damaged(str(error)) from None
            data = self._stream.unused_data if self._stream.eof else b""
            if self._stream.eof:
                self._stream = None


@contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """A local or remote file as it is stored. Raises OSError, and ValueError where a package is missing."""
    if "://" in path:
        filesystem, inside = remote(path)
        with filesystem.open(inside, "rb") as stream:
            yield io.BufferedReader(stream, BUFFER_BYTES)
    else:
        with open(path, "rb") as stream:
            yield stream


def decompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    """The content of a stored file whose name ends in `suffix`; "" for one that is not compressed."""
    if suffix not in COMPRESSIONS:
        return raw
    if suffix == ".zst":
        try:
            import zstandard  # noqa: F401
        except ImportError:
            raise ValueError("a .zst file needs the package zstandard: pip install zstandard") from None
    return io.BufferedReader(_Decompressed(raw, suffix), BUFFER_BYTES)


def remote(url: str) -> tuple[Any, str]:
    """The file system of a URL, such as s3://bucket/key, and the place in it. Raises ValueError where it has none."""
    scheme = url.partition("://")[0]
    try:
        import fsspec

        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub"}.get(scheme, "fsspec")
        raise ValueError(f"{url}: {scheme}:// needs a package ({error}): pip install {package}") from None
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from None
