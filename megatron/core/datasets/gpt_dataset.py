"""Fixed-length samples from the documents of one indexed dataset, in Megatron-LM's order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import StepShape
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indices import GPTIndex, finds_starts, gpt_index_parts, plan_epochs
from megatron.core.datasets.sample_format import Sample, SampleFormat

# Number and length of the evenly spaced ranges of token ids that are checked when a dataset is opened.
PROBES, PROBE_LENGTH = 64, 4096


class TextDataset(ABC):
    """Base class of datasets of token ids. Subclasses set the number of samples and return the tokens of each
    sample."""

    samples: int
    format: SampleFormat
    fingerprint: str

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        return self.format.sample(self.text(index))

    def text(self, index: int) -> NDArray[np.int64]:
        """Return the seq_length + 1 token ids of a sample."""
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        return self._text(index)

    @abstractmethod
    def _text(self, index: int) -> NDArray[np.int64]: ...

    def sources_of(self, samples: range) -> NDArray[np.int64]:
        """Return the source number of each sample, [samples]. In a blend, this is the number of the dataset from which
        the sample was drawn; in any other dataset, all source numbers are 0."""
        return np.zeros(len(samples), np.int64)

    @abstractmethod
    def origin(self, index: int) -> str:
        """Return where a sample starts, in the form `dataset:document+token`."""

    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        """Return (document, first token, number of tokens) of each part of a sample's seq_length + 1 tokens, in order.

        An empty list means that the dataset does not record from which documents its samples come.
        """
        return []


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents of an indexed dataset. A split may consist of pieces instead of whole documents."""

    documents: NDArray[np.int64]
    """Document number of each piece, [n]."""

    starts: NDArray[np.int64]
    """Token offset at which each piece starts within its document, [n]."""

    lengths: NDArray[np.int64]
    """Number of tokens in each piece [n]."""

    digest: str
    """Hash of the inputs that determine the three arrays."""

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())


class DocumentSamples(TextDataset):
    """Base class of datasets whose samples consist of documents, or pieces of documents, of an indexed dataset.
    Subclasses divide the tokens into samples."""

    padding: int | None = None
    """Padding token for samples that are longer than their documents. `padding` is None if the class never pads
    samples."""

    def __init__(
        self, indexed: IndexedDataset, documents: range | Pieces, format: SampleFormat, of_split: str, fewest: int
    ) -> None:
        """Create the dataset.

        Args:
            indexed: Dataset of the documents.
            documents: Documents of the split, or pieces of documents.
            format: Converter from tokens to model inputs.
            of_split: Name of the split, for messages.
            fewest: Minimum number of tokens that the documents must contain together.

        Raises:
            ValueError: The documents contain fewer than `fewest` tokens.
        """
        self.indexed = indexed
        self.format = format
        if indexed.dtype.kind not in "iu":
            raise ValueError(
                f"dataset {indexed.prefix} holds {indexed.dtype.name}, not token ids; "
                "create it with tools/preprocess_data.py"
            )
        assert indexed.checked
        self.pieces = None if isinstance(documents, range) else documents
        self.numbers = documents if isinstance(documents, range) else range(len(documents))
        self.lengths = indexed.lengths if self.pieces is None else self.pieces.lengths
        """Number of tokens in each document of the indexed dataset, or in each piece."""

        self.tokens = int(self.lengths[self.numbers.start : self.numbers.stop].sum(dtype=np.int64))
        """Number of tokens in an epoch."""

        if self.tokens < fewest:
            raise ValueError(
                f"dataset {indexed.prefix}: the {len(documents)} documents of the {of_split} split have {self.tokens} "
                f"tokens, too few for one sample of --seq-length {format.seq_length} + 1; give the split a larger "
                "share in --split, add data, or shorten the sequence"
            )

    @property
    def source(self) -> dict[str, object]:
        """Description of this dataset's documents for a cache key: a digest of all document lengths, and either the
        range of document numbers or a digest of the pieces."""
        named = [self.numbers.start, self.numbers.stop] if self.pieces is None else self.pieces.digest
        return {"lengths": self.indexed.lengths_digest, "documents": named}

    @abstractmethod
    def rest(self, taken: int) -> tuple[NDArray, NDArray, NDArray]:
        """Return the pieces of documents that the first `taken` samples do not use as input. Pieces are returned as
        three arrays: the document, the first token and the number of tokens of each piece."""

    def _place(self, number: int, offset: int) -> tuple[int, int]:
        """Locate token `offset` of the document or piece `number`. Return the document's number, and the token's
        position in the document."""
        if self.pieces is None:
            return number, offset
        return int(self.pieces.documents[number]), offset + int(self.pieces.starts[number])

    def _text(self, index: int) -> NDArray[np.int64]:
        text = np.empty(self.format.seq_length + 1, np.int64)
        filled = 0
        for document, start, count in self.documents_of(index):
            text[filled : filled + count] = self.indexed.get(document, start, start + count)
            filled += count
        if filled < len(text):
            where = f"{self.indexed.prefix}: sample {index}"
            assert self.padding is not None, f"{where} has {filled} tokens; run inspect_dataset"
            text[filled:] = self.padding
        self.format.check_ids(text, f"dataset {self.indexed.prefix}: sample {index}")
        return text

    @abstractmethod
    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        """Return the parts of documents that a sample contains, without padding (see `TextDataset.documents_of`)."""

    def origin(self, index: int) -> str:
        """Return where a sample starts, in the form `dataset:document+token`."""
        document, start, _ = self.documents_of(index)[0]
        return f"{Path(self.indexed.prefix).name}:{document}+{start}"

    def _probe(self) -> str:
        """Read some ranges of tokens, check that the token ids are in the vocabulary, and return a hash of the
        tokens."""
        length = min(PROBE_LENGTH, self.indexed.num_tokens)
        digest = blake2b(digest_size=16)
        for start in np.linspace(0, self.indexed.num_tokens - length, PROBES).astype(np.int64).tolist():
            stretch = self.indexed.read(start, length)
            self.format.check_ids(stretch, f"dataset {self.indexed.prefix}")
            digest.update(stretch.tobytes())
        return digest.hexdigest()


class GPTDataset(DocumentSamples):
    """Megatron-LM's GPT dataset: fixed-length samples of a shuffled token stream."""

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range | Pieces,
        samples: int | None,
        format: SampleFormat,
        *,
        seed: int,
        split: str = "train",
        cache: IndexCache,
    ) -> None:
        """Create the dataset.

        Args:
            indexed: Dataset of the documents.
            documents: Numbers of the split's documents, or pieces of documents.
            samples: Minimum number of samples, or None for one epoch.
            format: Converter from tokens to model inputs.
            seed: Seed of the sample order.
            split: Name of the split, for messages.
            cache: Cache for the index files.

        Raises:
            ValueError: The documents contain too few tokens for a sample, or token ids outside the vocabulary.
        """
        super().__init__(indexed, documents, format, split, 1 if samples is not None else format.seq_length + 1)
        self.plan = plan_epochs(self.tokens, samples, format.seq_length)
        self.samples = self.plan.samples
        # The requested number of samples affects the index only through the epoch plan, so runs of different lengths
        # can share an index.
        order = {
            **self.source,
            "epochs": self.plan.epochs,
            "final_epoch_apart": self.plan.final_apart,
            "sequence_length": format.seq_length,
            "seed": seed,
        }
        arrays = cache.arrays(
            GPTIndex._fields,
            f"GPTDataset-{split}",
            order | ({"sample_index": "document ends"} if finds_starts(self.plan, self.numbers) else {}),
            lambda: gpt_index_parts(self.lengths, self.numbers, self.plan, format.seq_length, seed),
            made_from=[f"{indexed.prefix}.idx"],
        )
        self.index = GPTIndex(*arrays)
        self.fingerprint = content_hash({"order": order, "tokens": self._probe()})

    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        drawn = int(self.index.shuffle_index[index])
        first, offset = self.index.start(drawn, self.format.seq_length)
        last, _ = self.index.start(drawn + 1, self.format.seq_length)
        found, left = [], self.format.seq_length + 1
        for number in self.index.document_index[first : last + 1].tolist():
            count = min(left, int(self.lengths[number]) - offset)
            if count:
                found.append((*self._place(number, offset), count))
            offset = 0
            left = left - count
        return found

    def rest(self, taken: int) -> tuple[NDArray, NDArray, NDArray]:
        """Return the pieces of documents that the first `taken` samples do not use, in the order of the token
        stream."""
        length, index = self.format.seq_length, self.index
        ends = np.cumsum(self.lengths[index.document_index], dtype=np.int64)
        begins = np.append(0, ends[:-1])
        numbers = np.sort(index.shuffle_index[taken:]).astype(np.int64)
        left = np.append(numbers, self.samples)  # The last entry represents the tokens after all samples.
        first = np.flatnonzero(np.diff(left, prepend=-2) != 1)  # positions at which runs of consecutive samples begin
        runs, stops = left[first] * length, np.append((left[first[1:] - 1] + 1) * length, ends[-1])
        run = np.searchsorted(runs, begins, side="right") - 1
        inside = (run >= 0) & (begins < stops[run])
        starts = np.unique(np.concatenate((runs, begins[inside])))
        where = np.searchsorted(ends, starts, side="right")
        sizes = np.minimum(ends[where], stops[np.searchsorted(runs, starts, side="right") - 1]) - starts
        documents, offsets = index.document_index[where].astype(np.int64), starts - begins[where]
        if self.pieces is not None:
            documents, offsets = self.pieces.documents[documents], offsets + self.pieces.starts[documents]
        return documents, offsets, sizes


class SampleMaker(Protocol):
    """Function or class that makes samples from documents. The returned dataset has at least `samples` samples, or one
    epoch if `samples` is None. `GPTDataset` is a class with this interface."""

    def __call__(
        self,
        indexed: IndexedDataset,
        documents: range | Pieces,
        samples: int | None,
        format: SampleFormat,
        *,
        seed: int,
        split: str,
        cache: IndexCache,
    ) -> DocumentSamples: ...


@runtime_checkable
class DividesDocuments(Protocol):
    """Interface of extension options that may replace Megatron-LM's division of documents into samples."""

    def sample_maker(self) -> SampleMaker | None:
        """Return the class that composes samples from documents, or None if no flag selects such a class."""

    def line(self, lengths: NDArray | None, seq_length: int, step: StepShape | None) -> str | None:
        """Return a one-line description of the samples and the steps of the run, for logs and plans. `lengths`
        [documents] is None if the document lengths are unknown. The method returns None if the flags do not change how
        documents are divided.
        """
