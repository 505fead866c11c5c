"""Cache of index files, which are built once and memory-mapped by every process of a node.

A file name contains a hash of everything that determines the content, so a stale file is never read. Each file is first
written and synced under a temporary name, and then renamed. A file that exists under its final name is therefore
complete. Each file ends with a checksum of its array. Every process verifies the checksum. A changed or damaged file is
rebuilt. Each process checks independently whether the files exist, so the cache may be on one disk per node or on a
shared disk. A lock on the folder lets one process build while the others wait. Without locks, as on some network disks,
processes build the same files concurrently.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron.core.fsync import sync_folder, whole_file

logger = logging.getLogger(__name__)

# Version number, which is increased whenever the same inputs give a different index.
FORMAT = 1
DIGEST_BLOCK = 1 << 18
# This marker precedes the checksum, which follows the array in a file. numpy ignores bytes after the array.
CHECKSUM = b"\nCRC32 "
# Seconds after which an unmodified temporary file counts as abandoned.
ABANDONED = 24 * 3600


def content_hash(description: Mapping[str, object]) -> str:
    """Return the hash of a description that can be converted to JSON."""
    text = json.dumps({"format": FORMAT, **description}, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def array_digest(array: NDArray) -> str:
    """Return a hash of an array's bytes. Threads hash blocks of the array, which takes about 1 s per GB on one core."""
    return blake2b(_of_blocks(lambda block: blake2b(block, digest_size=16).digest(), array), digest_size=16).hexdigest()


def array_checksum(array: NDArray) -> int:
    """Return a checksum of an array. Threads compute a CRC-32 for each block of the array. The checksum is the CRC-32
    of all block checksums. Computing the checksum takes about 0.3 s per GB on one core.

    The checksum detects damage but not tampering.
    """
    return zlib.crc32(_of_blocks(lambda block: zlib.crc32(block).to_bytes(4, "little"), array))


def _of_blocks(function: Callable[[memoryview], bytes], array: NDArray) -> bytes:
    """Call `function` for each block of an array, in threads, and return the concatenated results."""

    def of_block(start: int) -> bytes:
        return function(np.ascontiguousarray(array[start : start + DIGEST_BLOCK]).data.cast("B"))

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return b"".join(pool.map(of_block, range(0, len(array), DIGEST_BLOCK)))


class IndexCache:
    """Folder in which index files are cached.

    If `folder` is None, the cache uses the folder `default` next to the data. If `default` is not writable, the indices
    stay in memory, and a warning is logged. If `folder` is given but not writable, `arrays` raises ValueError.
    """

    def __init__(self, folder: str | None, default: str) -> None:
        self.required = folder is not None
        self.folder = Path(folder if folder is not None else default)

    def arrays(
        self,
        names: Sequence[str],
        label: str,
        description: Mapping[str, object],
        build: Callable[[], Iterable[NDArray]],
        made_from: Sequence[str] = (),
    ) -> list[NDArray]:
        """Memory-map arrays from their files. If the files do not exist, build and write the arrays. While one array is
        written, the next array is built.

        Args:
            names: Names of the arrays, in the order in which `build` yields the arrays.
            label: Part of the file names that tells a human reader what the files contain.
            description: Mapping with all values that determine the contents of the arrays. The hash of the description
                is part of the file names.
            build: Function that yields the arrays.
            made_from: Source paths, which are stored with the arrays for human readers and are not part of the hash.
        """
        stem = f"{content_hash(description)}-{label}"
        found = self._load(stem, names)
        if found is not None:
            return found
        built: list[NDArray] = []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not os.access(self.folder, os.W_OK):
                raise PermissionError("the folder is not writable")
            with folder_lock(self.folder):
                found = self._load(stem, names)  # Another process may have built the files while this one waited.
                if found is None:
                    _sweep(self.folder)
                    told = {**description, "made_from": list(made_from)}
                    self._store(stem, names, _keeping(build(), built), told)
                    found = self._load(stem, names)
        except OSError as error:
            if self.required:
                raise ValueError(
                    f"--data-cache-path {self.folder}: index files cannot be written ({error}); "
                    "use a folder that can be written and has free space"
                ) from error
            _warn_once(self.folder, str(error))
        if found is not None:
            return found
        return built if len(built) == len(names) else list(build())

    def _path(self, stem: str, name: str) -> Path:
        return self.folder / f"{stem}-{name}.npy"

    def _load(self, stem: str, names: Sequence[str]) -> list[NDArray] | None:
        found = []
        for path in (self._path(stem, name) for name in names):
            try:
                found.append(_load_whole(path))
            except FileNotFoundError:
                return None
            except (OSError, ValueError, EOFError) as error:
                _warn_damaged(path, str(error))
                return None
        return found

    def _store(
        self, stem: str, names: Sequence[str], arrays: Iterable[NDArray], description: Mapping[str, object]
    ) -> None:
        text = json.dumps(description, indent=1).encode()
        with whole_file(self.folder / f"{stem}-description.txt", synced=True) as temporary:
            temporary.write_bytes(text)
        with ThreadPoolExecutor(1) as writer:
            writes = [
                writer.submit(_save_whole, array, self._path(stem, name))
                for name, array in zip(names, arrays, strict=True)
            ]
            for write in writes:
                write.result()
        sync_folder(self.folder)


def _keeping(arrays: Iterable[NDArray], kept: list[NDArray]) -> Iterator[NDArray]:
    """Yield the arrays, and append each array to the list `kept`."""
    for array in arrays:
        kept.append(array)
        yield array


@cache
def _warn_once(folder: Path, why: str) -> None:
    logger.warning(
        "index files cannot be written to %s (%s): this process keeps the indices in memory and builds them at every "
        "start; --data-cache-path FOLDER selects another folder",
        folder,
        why,
    )


@cache
def _warn_damaged(path: Path, why: str) -> None:
    logger.warning("index file %s: %s; building it again", path, why)


def _save(array: NDArray, path: Path) -> None:
    """Write numpy's file format with Python's file I/O, because `np.save` does not report an error if the disk becomes
    full while the last block is written."""
    array = np.ascontiguousarray(array)
    with open(path, "wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(array))
        stream.write(array.data)
        stream.write(_checksum_line(array))


def _checksum_line(array: NDArray) -> bytes:
    return CHECKSUM + f"{array_checksum(array):08x}".encode()


def _load_whole(path: Path) -> NDArray:
    """Memory-map an array. The function raises ValueError unless the file ends with the checksum of its content."""
    array: NDArray = np.load(path, mmap_mode="r").view(np.ndarray)
    expected = _checksum_line(array)
    with open(path, "rb") as stream:
        stream.seek(-len(expected), os.SEEK_END)
        if CHECKSUM not in (end := stream.read()):
            raise ValueError("it has no checksum")
    if end != expected or path.stat().st_size < array.nbytes + len(expected):
        raise ValueError("it has changed since it was written: its checksum differs")
    return array


def _save_whole(array: NDArray, path: Path) -> None:
    with whole_file(path, synced=True) as temporary:
        _save(array, temporary)


def _sweep(folder: Path) -> None:
    """Delete the temporary files of killed processes, that is, all temporary files that were not modified for
    `ABANDONED` seconds."""
    for path in folder.glob(".*.tmp"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > ABANDONED:
                path.unlink()


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the advisory lock of the folder if the file system supports locks. The lock is released when the context or
    the process exits."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            logger.debug("no lock on %s (%s): building without", folder, error)
        yield
    finally:
        os.close(handle)
