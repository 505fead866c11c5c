"""Reader and writer of indexed datasets. `PREFIX.bin` holds the token ids, and `PREFIX.idx` holds the position of each
sequence.

`.bin` holds the token ids contiguously, in little-endian order and in a single dtype. `.idx` holds

    9 bytes   b"MMIDIDX\\0\\0"
    uint64    version, 1
    uint8     dtype code, a key of `DTYPES`
    uint64    number of sequences n
    uint64    number of document boundaries d, which is documents + 1
    int32[n]  length of each sequence in tokens
    int64[n]  byte offset of each sequence in `.bin`
    int64[d]  first sequence of each document, and n at the end

A GPT dataset has one sequence per document. All positions in a file are int64, because files may be far larger than
2**31 bytes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.index_cache import array_digest
from megatron.core.dist_checkpointing.file_storage import UrlPath, located, storage_of

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    code: np.dtype(name).newbyteorder("<")
    for code, name in enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), 1)
}
# Number of index values processed at a time. This number limits the memory that a scan of an index needs.
BLOCK = 1 << 20


def strip_suffix(prefix: str) -> str:
    """Remove .bin or .idx from a dataset's name."""
    return prefix[:-4] if prefix.endswith((".bin", ".idx")) else prefix


class IndexedDataset:
    """A `.bin/.idx` pair on disk or under a storage URL. The index is memory-mapped, and sequences are read on demand.

    The `.bin` file is read with explicit read calls instead of a memory map, because training reads documents in random
    order. With a memory map, read-ahead is wasted (measured: at least 10 times slower if the file is not in memory),
    page faults hold the interpreter lock, and a truncated file kills the process.

    Opening the dataset reads only the header of the index. The constructor raises ValueError, with the actual and the
    expected value, if a file is missing, truncated or in another format, or if the two files do not belong together.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = strip_suffix(prefix)
        self._index = _map(self.prefix + ".idx", prefix)
        self.dtype, sequences, boundaries = self._read_header()
        at = HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(self._index, "<i4", sequences, at)
        at += 4 * sequences
        self.offsets: NDArray[np.int64] = np.frombuffer(self._index, "<i8", sequences, at)
        at += 8 * sequences
        self.document_boundaries: NDArray[np.int64] = np.frombuffer(self._index, "<i8", boundaries, at)
        self._pread, size = _reader(self.prefix + ".bin", prefix)
        self._check_data_size(size)
        self.num_tokens = size // self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray:
        return self.get(index)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    @cached_property
    def lengths_digest(self) -> str:
        """Hash of all sequence lengths."""
        return array_digest(self.lengths)

    @property
    def num_documents(self) -> int:
        return max(0, len(self.document_boundaries) - 1)

    @property
    def tokens(self) -> NDArray:
        """Return all token ids in file order, as a memory map for sequential reading."""
        return np.frombuffer(_map(self.prefix + ".bin", self.prefix), self.dtype)

    def get(self, index: int, start: int = 0, stop: int | None = None) -> NDArray:
        """Return the token ids [start, stop) of a sequence. If `stop` is None or too large, return the token ids up to
        the end of the sequence. This method is thread-safe."""
        length = int(self.lengths[index])
        stop = length if stop is None else min(stop, length)
        return self.read(int(self.offsets[index]) // self.dtype.itemsize + start, max(0, stop - start))

    def read(self, first: int, count: int) -> NDArray:
        """Read `count` token ids, starting with token number `first` of the file. The method raises OSError if the file
        is too short."""
        size = count * self.dtype.itemsize
        data = self._pread(first * self.dtype.itemsize, size)
        while len(data) < size:  # A single read returns at most 2 GB.
            more = self._pread(first * self.dtype.itemsize + len(data), size - len(data))
            if not more:
                raise OSError(
                    f"{self.prefix}.bin ends at token {first + len(data) // self.dtype.itemsize}; it was truncated"
                )
            data += more
        return np.frombuffer(data, self.dtype)

    def verify(self) -> list[str]:
        """Read the whole index, and return a message for each inconsistency in its sequence lengths, byte offsets and
        document boundaries."""
        found = self._wrong_sequences()
        if not self._boundaries_ascend():
            found.append(f"document boundaries do not run from 0 to the {len(self)} sequences")
        return found

    @cached_property
    def checked(self) -> bool:
        """Raise ValueError if the lengths, positions and document boundaries in the index contradict each other.
        Otherwise return True.

        The whole index is read, which takes about 1 s per 100 million sequences.
        """
        if wrong := self.verify():
            raise ValueError(
                f"{self.prefix}.idx: damaged: {'; '.join(wrong)}; write or copy the dataset again "
                "(tools/inspect_dataset.py describes it)"
            )
        return True

    def _boundaries_ascend(self) -> bool:
        bounds = self.document_boundaries
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(self):
            return False
        blocks = (bounds[start : start + BLOCK + 1] for start in range(0, len(bounds), BLOCK))
        return all(bool((block[1:] >= block[:-1]).all()) for block in blocks)

    def _wrong_sequences(self) -> list[str]:
        found = []
        if len(self) and int(self.lengths.min()) < 0:
            found.append(f"sequence {int(self.lengths.argmin())} has length {int(self.lengths.min())}")
        expected = 0
        for start in range(0, len(self), BLOCK):
            sizes = self.lengths[start : start + BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = expected + np.cumsum(sizes)
            wrong = np.flatnonzero(self.offsets[start : start + BLOCK] != ends - sizes)
            if len(wrong):
                at = start + int(wrong[0])
                found.append(f"sequence {at} starts at byte {self.offsets[at]}, not after the one before it")
                break
            expected = int(ends[-1])
        return found

    def _read_header(self) -> tuple[np.dtype, int, int]:
        path = self.prefix + ".idx"
        if len(self._index) < HEADER.size:
            raise ValueError(
                f"{path}: truncated: {len(self._index)} bytes, but the header has {HEADER.size}; "
                "write the dataset again with tools/preprocess_data.py"
            )
        magic, version, code, sequences, boundaries = HEADER.unpack_from(self._index)
        if magic != MAGIC:
            raise ValueError(
                f"{path}: starts with {magic!r}, but an indexed dataset starts with {MAGIC!r}; "
                "create one from JSONL with tools/preprocess_data.py"
            )
        if version != VERSION:
            raise ValueError(f"{path}: format version {version} is unknown; only version {VERSION} can be read")
        if code not in DTYPES:
            known = ", ".join(f"{key} {dtype.name}" for key, dtype in DTYPES.items())
            raise ValueError(f"{path}: dtype code {code} is unknown; known codes are {known}")
        expected = HEADER.size + 12 * sequences + 8 * boundaries
        if len(self._index) != expected:
            raise ValueError(
                f"{path}: {_cut(len(self._index), expected)}: {len(self._index)} bytes, but {sequences} sequences and "
                f"{boundaries} document boundaries take {expected}; write or copy the dataset again"
            )
        return DTYPES[code], sequences, boundaries

    def _check_data_size(self, size: int) -> None:
        end = 0
        if len(self):
            end = int(self.offsets[-1]) + int(self.lengths[-1]) * self.dtype.itemsize
        if size != end:
            raise ValueError(
                f"{self.prefix}.bin: {_cut(size, end)}: {size} bytes, but {self.prefix}.idx describes {end}; "
                "the two files do not belong together, or a copy is incomplete: write or copy both again"
            )


def _cut(size: int, expected: int) -> str:
    return "truncated" if size < expected else "too long"


def _reader(path: str, given: str) -> tuple[Callable[[int, int], bytes], int]:
    """Return a thread-safe function of (start, length), which reads bytes of a file, and the size of the file."""
    if isinstance(stored := located(path), UrlPath):
        storage = storage_of(stored)
        return partial(storage.read_shared, stored), _found(storage.size(stored), path, given)
    stream = _open(path, given)
    return lambda start, length: os.pread(stream.fileno(), length, start), os.fstat(stream.fileno()).st_size


def _found(size: int | None, path: str, given: str) -> int:
    if size is None:
        raise ValueError(f"dataset {given}: there is no {path}; use the prefix of the dataset, without .bin or .idx")
    return size


def _map(path: str, given: str) -> memoryview:
    if isinstance(stored := located(path), UrlPath):
        _found(storage_of(stored).size(stored), path, given)
        path = str(storage_of(stored).local_file(stored))
    with _open(path, given) as stream:
        if os.fstat(stream.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ))


def _open(path: str, given: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError:
        folder = Path(path).parent
        if os.path.isfile(given):
            remedy = "text is recognized by a suffix such as .txt or .jsonl; rename the file, or make a dataset from it"
            raise ValueError(f"dataset {given}: this file is not an indexed dataset; {remedy}") from None
        near = sorted(file.name[:-4] for file in folder.glob("*.idx")) if folder.is_dir() else []
        raise ValueError(
            f"dataset {given}: there is no file {path}; use the prefix of the dataset, without .bin or .idx"
            + (f"; {folder} has {', '.join(near[:8])}" if near else "")
        ) from None
    except IsADirectoryError:
        raise ValueError(f"dataset {given}: {path} is a folder, not a file") from None
