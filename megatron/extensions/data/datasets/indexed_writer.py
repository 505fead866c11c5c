"""Writer of indexed datasets. `megatron.core.datasets.indexed_dataset` describes their file format."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indexed_dataset import BLOCK, DTYPES, HEADER, MAGIC, VERSION, IndexedDataset
from megatron.core.dist_checkpointing.file_storage import UrlPath, located, storage_of
from megatron.core.dist_checkpointing.integrity import Sums, damages
from megatron.core.fsync import name_full_file, sync_folder

SUMS = ".sums.json"
"""File name suffix of a dataset's checksum file. The file contains {"files": {name: {"bytes": size, "crc32":
checksum}}}."""


def best_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype in which Megatron-LM stores token ids of a vocabulary with `vocab_size` tokens."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def read_sums(prefix: str) -> dict[str, object] | None:
    """Return the content of a dataset's checksum file, or None if the dataset has no checksums. Raises ValueError if
    the file is damaged."""
    path = located(prefix + SUMS)
    if (content := storage_of(path).content(path)) is None:
        return None
    try:
        found = json.loads(content)
        if not all(set(entry) == {"bytes", "crc32"} for entry in found["files"].values()):
            raise ValueError("an entry is none")
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError(f"{path}: damaged; delete it, or write the dataset again") from None
    return cast("dict[str, object]", found)


def damages_of(prefix: str) -> list[str] | None:
    """Return a message for each file of a dataset that differs from its checksum, or None if the dataset has no
    checksums. This function reads the `.bin` and `.idx` files completely."""
    try:
        found = read_sums(prefix)
    except ValueError as error:
        return [str(error)]
    if found is None:
        return None
    sums = cast("Sums", found["files"])
    return damages(located(prefix).parent, sums, sorted(sums))


class IndexedDatasetBuilder:
    """Writer that appends documents to a pair of `.bin` and `.idx` files, with constant memory use.

    Files have temporary names until `finalize` syncs them to disk and renames them. The index is renamed last. A
    dataset is therefore either complete or absent. If the writer is used as a context manager, it finalizes the dataset
    on success, and deletes its files if an exception is raised. If `prefix` is a URL, `.bin` is uploaded while it is
    written, and becomes visible when `finalize` completes the upload. `.idx` is uploaded after `.bin`. If `described`
    is given, a file `PREFIX.sums.json` with the checksums and the description is written last.
    """

    def __init__(self, prefix: str, dtype: np.dtype, described: Mapping[str, object] | None = None) -> None:
        self.prefix = prefix
        self.described = described
        self._sums = {kind: {"bytes": 0, "crc32": 0} for kind in ("bin", "idx")}
        self._stored = isinstance(located(prefix), UrlPath)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self.num_sequences = 0
        self.num_documents = 0
        self.num_tokens = 0
        self._code = next(code for code, known in DTYPES.items() if known == self.dtype)
        self._temporary: dict[str, str] = {}
        if not self._stored:
            Path(prefix).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._data = self._open("bin")
            self._lengths = self._open("lengths")
            self._boundaries = self._open("boundaries")
        except BaseException:
            # Temporary files are removed after any exception, such as KeyboardInterrupt or an error about too many open
            # files.
            self._remove()
            raise
        self._boundaries.write(np.zeros(1, "<i8").tobytes())

    def add_document(self, tokens: Sequence[int] | NDArray, lengths: Sequence[int] | None = None) -> None:
        """Append a document. `lengths` contains the lengths of the sequences that make up the document. If `lengths` is
        None, the document is a single sequence. If the document is empty, only a document boundary is stored."""
        values = _checked(tokens, self.dtype)
        if lengths is None:
            lengths = [len(values)] if len(values) else []
        assert sum(lengths) == len(values), f"sequence lengths {lengths} of {len(values)} tokens"
        boundary = self.num_sequences + len(lengths)
        self._write(values, np.asarray(lengths, "<i4"), np.array([boundary], "<i8"))

    def add_documents(self, tokens: NDArray, lengths: NDArray) -> None:
        """Append several documents, each of which is a single sequence. `tokens` is the concatenation of the documents,
        and `lengths` contains the length of each document."""
        values = _checked(tokens, self.dtype)
        assert int(lengths.sum(dtype=np.int64)) == len(values)
        boundaries = self.num_sequences + np.cumsum(lengths > 0, dtype=np.int64)
        self._write(values, lengths[lengths > 0].astype("<i4"), boundaries.astype("<i8"))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Append all documents of another dataset, which must have the same dtype."""
        if dataset.dtype != self.dtype:
            raise ValueError(
                f"{dataset.prefix}: tokens are {dataset.dtype.name}, but those of the previous datasets are "
                f"{self.dtype.name}; merge only datasets of one tokenizer"
            )
        first = self.num_sequences
        for start in range(0, dataset.num_tokens, BLOCK):
            self._write_data(dataset.read(start, min(BLOCK, dataset.num_tokens - start)).tobytes())
        for start in range(0, len(dataset), BLOCK):
            self._lengths.write(dataset.lengths[start : start + BLOCK].tobytes())
        bounds = dataset.document_boundaries
        for start in range(1, len(bounds), BLOCK):
            self._boundaries.write((bounds[start : start + BLOCK] + first).astype("<i8").tobytes())
        self.num_tokens += dataset.num_tokens
        self.num_sequences += len(dataset)
        self.num_documents += dataset.num_documents

    def finalize(self) -> None:
        """Complete both files and rename them to their final names."""
        for stream in (self._data, self._lengths, self._boundaries):
            stream.flush()
        if self._stored:
            self._remove_old()
            self._data.close()
            self._write_index(index := self._open("idx"))
            index.close()
            self._close()
        else:
            with self._open("idx") as index:
                self._write_index(index)
                _sync(index)
            _sync(self._data)
            self._close()
            self._remove_old()
            for kind in ("bin", "idx"):
                os.replace(self._temporary.pop(kind), f"{self.prefix}.{kind}")
            sync_folder(Path(self.prefix).parent)
        self._remove()
        if self.described is not None:
            files = {located(f"{self.prefix}.{kind}").name: sums for kind, sums in self._sums.items()}
            text = json.dumps({"files": files, **self.described}, indent=1) + "\n"
            path = located(self.prefix + SUMS)
            storage_of(path).write(path, text.encode())

    def abort(self) -> None:
        """Delete all files written so far."""
        for stream in (self._data, self._lengths, self._boundaries):
            # An unfinished upload is discarded and not closed, because closing would complete the upload. A local file
            # is closed. Closing flushes the buffer, which fails if the disk is full.
            with suppress(OSError):
                getattr(stream, "discard", stream.close)()
        self._remove()

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if error is None:
                self.finalize()
        except OSError as unfinished:
            error = unfinished
            raise
        finally:
            if error is not None:
                name_full_file(error, self.prefix)
                self.abort()

    def _write_data(self, data: bytes) -> None:
        self._data.write(data)
        self._count("bin", data)

    def _count(self, kind: str, data: bytes) -> None:
        sums = self._sums[kind]
        sums["bytes"] += len(data)
        sums["crc32"] = zlib.crc32(data, sums["crc32"])

    def _write_index(self, index: BinaryIO) -> None:
        def write(data: bytes) -> None:
            index.write(data)
            self._count("idx", data)

        header = (MAGIC, VERSION, self._code, self.num_sequences, self.num_documents + 1)
        write(HEADER.pack(*header))
        self._copy("lengths", write)
        self._write_offsets(write)
        self._copy("boundaries", write)

    def _copy(self, kind: str, write: Callable[[bytes], None]) -> None:
        with open(self._temporary[kind], "rb") as source:
            while block := source.read(8 * BLOCK):
                write(block)

    def _remove_old(self) -> None:
        """Remove the index and the checksums of an old dataset, so that they are never combined with the new data."""
        for suffix in (SUMS, ".idx"):
            path = located(self.prefix + suffix)
            with suppress(FileNotFoundError):
                storage_of(path).remove(path)

    def _write(self, values: NDArray, lengths: NDArray, boundaries: NDArray) -> None:
        self._write_data(values.tobytes())
        self._lengths.write(lengths.tobytes())
        self._boundaries.write(boundaries.tobytes())
        self.num_tokens += len(values)
        self.num_sequences += len(lengths)
        self.num_documents += len(boundaries)

    def _write_offsets(self, write: Callable[[bytes], None]) -> None:
        end = 0
        with open(self._temporary["lengths"], "rb") as lengths:
            while block := lengths.read(4 * BLOCK):
                sizes = np.frombuffer(block, "<i4").astype("<i8") * self.dtype.itemsize
                ends = end + np.cumsum(sizes)
                write((ends - sizes).astype("<i8").tobytes())
                end = int(ends[-1])

    def _open(self, kind: str) -> BinaryIO:
        if self._stored and kind in self._sums:
            stored = located(f"{self.prefix}.{kind}")
            return cast("BinaryIO", storage_of(stored).create(stored))
        path = Path(tempfile.gettempdir(), f"{os.urandom(8).hex()}") if self._stored else Path(self.prefix)
        self._temporary[kind] = str(path.with_name(f".{path.name}.{kind}.{os.getpid()}.tmp"))
        return open(self._temporary[kind], "wb")

    def _close(self) -> None:
        for stream in (self._data, self._lengths, self._boundaries):
            stream.close()

    def _remove(self) -> None:
        for path in self._temporary.values():
            Path(path).unlink(missing_ok=True)


def _checked(tokens: Sequence[int] | NDArray, dtype: np.dtype) -> NDArray:
    """Cast tokens to the dtype of the file. Raises ValueError if this dtype cannot represent a token id."""
    values = np.asarray(tokens)
    if values.dtype == dtype or len(values) == 0:
        return values.astype(dtype)
    limits = np.iinfo(dtype)
    if values.min() < limits.min or values.max() > limits.max:
        raise ValueError(
            f"token ids from {values.min()} to {values.max()} do not fit {dtype.name}, chosen for the vocabulary size; "
            "the tokenizer returned ids outside its vocabulary"
        )
    return values.astype(dtype)


def _sync(stream: BinaryIO) -> None:
    stream.flush()
    os.fsync(stream.fileno())
