"""Conversion of documents that a third-party library reads into a cached indexed dataset.

The cache, its locks and its checks are the same as for text files (`megatron.extensions.data.text_data.tokenized`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.data.datasets.indexed_writer import best_dtype
from megatron.extensions.data.sources.documents import Documents, text_files
from megatron.extensions.data.sources.path_kinds import SourceKind
from megatron.extensions.data.text_data.encoding import CHUNK_BYTES, Encoded, Job, encode_all, peak_memory
from megatron.extensions.data.text_data.formats import Chunk, Reading, Record
from megatron.extensions.data.text_data.identity import Digests, identity_of, state_of
from megatron.extensions.data.text_data.tokenized import Source, TextData

RECORDS = 1024
"""Number of records that are read at once if the records contain token ids."""


def dtype_of(job: Job) -> np.dtype:
    """Return the dtype of token ids. The dtype depends on the size of the tokenizer's vocabulary or on --vocab-size."""
    named = job.tokenizer.tokenizer_type is not None
    size = build_tokenizer(job.tokenizer, job.vocab_size).vocab_size if named else job.vocab_size
    return best_dtype(size or 1 << 30)


@dataclass(frozen=True)
class DocumentSource(Source):
    """Documents that are converted to an indexed dataset, together with everything that determines their token ids. A
    third-party library reads the documents."""

    documents: Documents
    path: str

    @classmethod
    def from_documents(cls, documents: Documents, path: str, job: Job, folder: Path) -> DocumentSource:
        """Create the source for documents that a third-party library reads.

        Args:
            documents: Documents to convert.
            path: Path of the data set, for messages.
            job: Tokenization settings.
            folder: Folder that stores the digests of files.
        """
        files = text_files(documents.files)
        digests = Digests(folder).of(files)
        described: dict[str, object] = {
            "files": [digests[file.path] for file in files],
            "library": type(documents).__name__,
            "key": documents.key,
        }
        if isinstance(documents.first(), np.ndarray):
            described["dtype"] = dtype_of(job).name
        else:
            described |= {"tokenizer": identity_of(job.tokenizer, job.vocab_size), "append_eod": job.append_eod}
        states = {file.path: state_of(file.path) for file in files}
        return cls(files, states, digests, described, documents, path)

    def dtype(self, job: Job) -> np.dtype:
        return dtype_of(job)

    def encoded(self, job: Job, workers: int) -> Iterator[tuple[Chunk, Encoded]]:
        if "dtype" in self.described:
            return self._tokens(job)
        return encode_all(job, self._chunks(), workers)

    def _chunks(self) -> Iterator[Chunk]:
        records: list[Record] = []
        size = 0
        number = 0
        for number, value in enumerate(self.documents, 1):
            if isinstance(value, np.ndarray):
                value = ValueError("token ids among texts")
            records.append(value if isinstance(value, ValueError) else (value,))
            size += 0 if isinstance(value, ValueError) else len(value)
            if size >= CHUNK_BYTES:
                yield self._chunk(number, records, size)
                records, size = [], 0
        if records:
            yield self._chunk(number, records, size)

    def _chunk(self, last: int, records: list[Record], size: int) -> Chunk:
        return Chunk(self.path, self.documents.unit, last - len(records) + 1, records, size, 0, False)

    def _tokens(self, job: Job) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield token ids unchanged, without adding end-of-document tokens."""
        documents, first = iter(self.documents), 1
        while values := list(islice(documents, RECORDS)):
            ids, bad = list[np.ndarray](), list[tuple[int, str]]()
            for number, value in enumerate(values, first):
                if isinstance(value, np.ndarray):
                    ids.append(value)
                else:
                    bad.append((number, str(value) if isinstance(value, ValueError) else "a text, not token ids"))
            lengths = np.array([len(each) for each in ids], np.int32)
            joined = np.concatenate(ids) if ids else np.empty(0, self.dtype(job))
            chunk = self._chunk(first + len(values) - 1, [b""] * len(values), joined.nbytes)
            yield chunk, Encoded([joined], [lengths], bad, 0, peak_memory(), 0)
            first += len(values)


@dataclass(frozen=True)
class SourceData(TextData):
    """Converter of documents to indexed datasets. Third-party libraries read the documents."""

    kind: SourceKind

    def prefix(self, flag: str, value: str) -> str:
        """Return the path prefix of the indexed dataset that contains the documents at `value`. Create the dataset if
        it does not exist. Raises ValueError if the documents cannot be read."""
        documents = self.kind.opened(flag, value, self.options.key_of(value))
        if not documents.files:
            raise ValueError(f"{flag} {value}: is not on this machine; stream it with --dataset-type stream")
        path = value.removeprefix(self.kind.scheme)
        reading = Reading((documents.key,), "file", "--text-key")
        job = Job(self.tokenizer, self.vocab_size, reading, self.options.append_eod, self.prepare)
        return self.made(flag, path, job, partial(DocumentSource.from_documents, documents, path, job))
