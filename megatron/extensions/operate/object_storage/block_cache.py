"""Cache on the local disk for blocks of files in object storage. All processes of a host share this cache. This module
does not import torch.

A cache file contains one block of a file in object storage, and a checksum. If the checksum shows that the block was
damaged, for example by a power cut, the block is fetched again. The name of a cache file's folder contains a hash that
identifies the content of the original file. Each block has a lock, so that only one process at a time fetches the
block. A separate lock protects the total size of all blocks. The least recently used blocks are deleted before the
total size exceeds the limit. If the disk is full, blocks are not cached.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from megatron.core.fsync import whole_file

logger = logging.getLogger(__name__)

VARIABLE = "MEGATRON_STORAGE_CACHE"
"""Environment variable that sets the cache folder of processes that are started without --storage-cache."""

SMALLEST_BLOCK, USUAL_BLOCK = 64 << 10, 256 << 10
MOST_BLOCKS = 1 << 18
LONG_READ = 4
"""A read of more than this number of blocks bypasses the cache. Such a long read is probably part of reading a whole
file in order, so the same bytes are not likely to be needed again soon."""

PIECE = 16 << 20
CHECKSUM = 4


class Stored(NamedTuple):
    """File in object storage whose content is assumed not to change."""

    name: str
    identity: str
    """Identifier that changes with the content of the file, such as an ETag."""

    size: int
    fetch: Callable[[int, int], bytes]
    """Function that reads `length` bytes from `start`. The function raises OSError if the file cannot be read."""

    @property
    def key(self) -> str:
        return blake2b(f"{self.name}\n{self.identity}\n{self.size}".encode(), digest_size=12).hexdigest()


def default_folder() -> Path:
    """Return the folder that the environment variable `VARIABLE` names. If the variable is not set, return a folder for
    this user in the system's temporary folder."""
    return Path(os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / f"megatron-storage-{os.getuid()}")


@dataclass
class BlockCache:
    """Block cache in a folder. The size of the cache is limited to `limit` bytes. All methods may be called from
    several threads and processes."""

    folder: Path = field(default_factory=default_folder)
    limit: int = 32 << 30
    keeps_checkpoints: bool = False
    """True if checkpoint files are read through the cache."""

    def block_bytes(self, stored: Stored) -> int:
        """Return the block size in bytes for a file. Blocks are small if the file does not fit into the cache, because
        most bytes of a large block would be deleted before they are used."""
        fewest = 1 << (max(1, self.limit // MOST_BLOCKS) - 1).bit_length()
        return max(fewest, USUAL_BLOCK if stored.size <= self.limit // 2 else SMALLEST_BLOCK)

    def read(self, stored: Stored, start: int, length: int) -> bytes:
        """Read up to `length` bytes, starting at the offset `start`. Fewer bytes are returned at the end of the file.
        Raises OSError if the file cannot be read."""
        end, size = min(start + length, stored.size), self.block_bytes(stored)
        if end <= start:
            return b""
        if end - start > LONG_READ * size:
            return stored.fetch(start, end - start)
        numbers = range(start // size, -(-end // size))
        blocks = (self.block(stored, number)[max(0, start - number * size) : end - number * size] for number in numbers)
        return b"".join(blocks)

    def block(self, stored: Stored, number: int) -> bytes:
        """Return a block of a file from the cache. If the block is not cached, fetch it from the store and add it to
        the cache."""
        size, path = self.block_bytes(stored), self._path(stored, number)
        if (found := _intact(path)) is not None:
            return found
        with self._locked(f"block-{(int(stored.key[:4], 16) + number) % 64}"):
            if (found := _intact(path)) is None:
                found = stored.fetch(number * size, min(size, stored.size - number * size))
                self._keep(path, found)
        return found

    def read_kept(self, stored: Stored, start: int, length: int) -> bytes:
        """Read a long range of a file. Use this method for files that all processes of this host read. Unlike `read`,
        this method always uses the cache, and fetches consecutive missing blocks in one request. Only one process at a
        time reads each part of `PIECE` bytes."""
        end, parts = min(start + length, stored.size), list[bytes]()
        while start < end:
            number = start // PIECE
            stop = min(end, (number + 1) * PIECE)
            with self._locked(f"part-{(int(stored.key[:4], 16) + number) % 64}"):
                parts.append(self._part(stored, start, stop))
            start = stop
        return b"".join(parts)

    def _part(self, stored: Stored, start: int, stop: int) -> bytes:
        size = self.block_bytes(stored)
        numbers = range(start // size, -(-stop // size))
        found = {number: _intact(self._path(stored, number)) for number in numbers}
        for first, last in _runs([number for number in numbers if found[number] is None]):
            data = stored.fetch(first * size, min(last * size, stored.size) - first * size)
            for number in range(first, last):
                block = found[number] = data[(number - first) * size : (number + 1 - first) * size]
                self._keep(self._path(stored, number), block)
        begin = numbers.start * size
        return b"".join(block for block in found.values() if block is not None)[start - begin : stop - begin]

    def _path(self, stored: Stored, number: int) -> Path:
        size = self.block_bytes(stored)
        return self.folder / f"{stored.key}-{size >> 10}" / f"{number % 256:02x}" / f"{number:x}"

    def whole(self, stored: Stored) -> Path:
        """Return the path of a local copy of a whole file. The copy is never deleted automatically, and does not count
        toward the size limit of the cache."""
        path = self.folder / "whole" / stored.key
        with self._locked(f"whole-{stored.key}"):
            if not path.exists() or path.stat().st_size != stored.size:
                path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(path, synced=True) as temporary:
                    _download(stored, temporary)
        return path

    def bytes_kept(self) -> int:
        """Return the number of bytes in all blocks on the disk."""
        return sum(size for _, size, _ in self._blocks())

    def _keep(self, path: Path, data: bytes) -> None:
        try:
            self._reserve(len(data) + CHECKSUM)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
            try:
                temporary.write_bytes(data + zlib.crc32(data).to_bytes(CHECKSUM, "little"))
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            _warn_once(self.folder, str(error))

    def _reserve(self, nbytes: int) -> None:
        """Reserve space for bytes that are about to be written, and delete old blocks if the limit is exceeded."""
        with self._locked("count"):
            counter = self.folder / "count"
            try:
                kept = int(counter.read_bytes())
            except (FileNotFoundError, ValueError):
                kept = self.bytes_kept()
            if kept + nbytes > self.limit:
                kept = self._evict(self.limit - max(nbytes, self.limit // 16))
            counter.write_bytes(b"%d" % (kept + nbytes))

    def _evict(self, allowed: int) -> int:
        """Delete the least recently used blocks until at most `allowed` bytes remain. Return the number of remaining
        bytes."""
        blocks = sorted(self._blocks())
        kept = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if kept <= allowed:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            kept -= size
        return kept

    def _blocks(self) -> Iterator[tuple[int, int, str]]:
        """Yield a tuple for each block: time of last use, size in bytes, and path. If a process was killed while it was
        writing a block, the incomplete file also counts as a block."""
        for folder in self.folder.glob("*-*/*"):
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        about = entry.stat()
                        yield about.st_mtime_ns, about.st_size, entry.path

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock file `name` in the cache folder. If the file system does not support locks, do nothing. The
        lock is also released if the process ends."""
        folder = self.folder / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise OSError(
                f"the cache of object storage in {self.folder} cannot be written ({error.strerror}); choose another "
                f"folder with --storage-cache, or {VARIABLE} for tools"
            ) from None
        try:
            with suppress(OSError):
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)


def _intact(path: Path) -> bytes | None:
    """Return the content of a cache file; None if the file is missing or damaged."""
    try:
        with open(path, "rb") as file:
            data = file.read()
            with suppress(OSError):
                os.utime(file.fileno())
    except OSError:
        return None
    content = data[:-CHECKSUM]
    return content if zlib.crc32(content).to_bytes(CHECKSUM, "little") == data[-CHECKSUM:] else None


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Group consecutive numbers, and yield a pair (first number, last number + 1) for each group."""
    for _, run in groupby(enumerate(numbers), lambda each: each[1] - each[0]):
        members = [number for _, number in run]
        yield members[0], members[-1] + 1


def _download(stored: Stored, path: Path) -> None:
    """Fetch a file in pieces. Several pieces are fetched in parallel."""
    with open(path, "wb") as file, ThreadPoolExecutor(4, "download") as pool:
        file.truncate(stored.size)

        def piece(at: int) -> None:
            os.pwrite(file.fileno(), stored.fetch(at, min(PIECE, stored.size - at)), at)

        _all(pool.map(piece, range(0, stored.size, PIECE)))


def _all(results: Iterable[object]) -> None:
    for _ in results:
        pass


@cache
def _warn_once(folder: Path, why: str) -> None:
    logger.warning("blocks of object storage cannot be cached in %s (%s): every read fetches them again", folder, why)


CACHE = BlockCache()
"""Block cache of this process. `StorageTraffic` sets the folder and the size limit of the cache according to the flags
of the run."""
