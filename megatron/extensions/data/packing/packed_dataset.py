"""Data set whose samples consist of whole documents. `megatron.extensions.data.packing.order` determines the order of
the samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import DocumentSamples, Pieces
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.sample_format import Sample, SampleFormat
from megatron.extensions.data.packing.order import Packed, Rounds, blocks, round_of


class PackedDataset(DocumentSamples):
    """Data set of at least `samples` samples, or of one epoch if `samples` is None. Samples consist of whole documents;
    only documents that are longer than a sample are divided.

    The order of samples is the same for any value of `samples`. Raises ValueError if no document has two tokens, or if
    a token id is outside the vocabulary.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range | Pieces,
        samples: int | None,
        format: SampleFormat,
        *,
        window: int,
        seed: int,
        split: str,
        cache: IndexCache,
    ) -> None:
        super().__init__(indexed, documents, format, split, fewest=1)
        assert format.eod is not None, "a rule requires a tokenizer"
        self.eod = self.padding = format.eod
        rounds = Rounds.of(self.lengths, self.numbers, format.seq_length, window)
        order = {
            **self.source,
            "packing": "best-fit",
            "epochs": rounds.epochs,
            "windows": rounds.windows,
            "sequence_length": format.seq_length,
            "seed": seed,
        }
        parts: list[Packed] = []

        def made(block: range) -> Iterator[NDArray]:
            found = [round_of(self.lengths, rounds, format.seq_length, seed, number) for number in block]
            yield from Packed.joined(found)

        for block in blocks():
            described = {**order, "rounds": [block.start, block.stop]}
            arrays = cache.arrays(
                Packed._fields,
                f"Packed-{split}",
                described,
                lambda block=block: made(block),  # type: ignore[misc]
                made_from=[f"{indexed.prefix}.idx"],
            )
            parts.append(Packed(*arrays))
            if not len(parts[0].ends):
                raise ValueError(
                    f"dataset {indexed.prefix}: no document of the {split} split has two tokens, so that nothing can "
                    "be predicted; add data, or use --sequence-packing greedy"
                )
            if samples is None or sum(len(part.ends) for part in parts) >= samples:
                break
        self.index = parts[0] if len(parts) == 1 else Packed.joined(parts)
        self.samples = len(self.index.ends)
        self.fingerprint = content_hash({"order": order, "tokens": self._probe()})

    def __getitem__(self, index: int) -> Sample:
        """Return the model inputs of a sample. Document boundaries are derived from the document lengths, not from
        end-of-document tokens. The loss mask excludes predictions across document boundaries. The padding at the end of
        a sample counts as one more document, which the loss mask also excludes."""
        text = self.text(index)
        lengths = self.index.lengths[self._parts(index)]
        sizes = np.append(lengths, len(text) - int(lengths.sum()))
        ids = np.repeat(np.arange(len(sizes)), sizes)
        tokens, document_ids = text[:-1], ids[:-1]
        counts = (ids[1:] == document_ids) & (document_ids < len(lengths))
        if self.format.eod_mask_loss:
            counts &= tokens != self.eod
        position_ids = None
        if self.format.reset_position_ids:
            starts = np.cumsum(sizes) - sizes
            position_ids = np.arange(len(tokens)) - starts[document_ids]
        return {
            "tokens": tokens,
            "labels": text[1:],
            "loss_mask": counts.astype(np.float32),
            "position_ids": position_ids,
            "document_ids": document_ids,
        }

    def documents_of(self, index: int) -> list[tuple[int, int, int]]:
        parts = self._parts(index)
        numbers = zip(*(field[parts].tolist() for field in self.index[1:]), strict=True)
        return [(*self._place(number, start), count) for number, start, count in numbers]

    def rest(self, taken: int) -> tuple[NDArray, NDArray, NDArray]:
        """Return the document numbers, start positions and lengths of all document parts after the first `taken`
        samples."""
        first = int(self.index.ends[taken - 1]) if taken else 0
        documents, starts, lengths = (field[first:] for field in self.index[1:])
        if self.pieces is not None:
            documents, starts = self.pieces.documents[documents], starts + self.pieces.starts[documents]
        return documents, starts, lengths

    def _parts(self, index: int) -> slice:
        first = int(self.index.ends[index - 1]) if index else 0
        return slice(first, int(self.index.ends[index]))
