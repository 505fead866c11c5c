"""What becomes of a training source where the sequence length of a run changes: the tokens that no sample has had as
inputs are cut anew and come first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.gpt_dataset import GPTDataset, Pieces, SampleFormat
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.source_order import SourceOrder


def cut_anew(source: SourceOrder, format: SampleFormat) -> None:
    """Gives a source the order of a phase of `format`, as the phases before left it."""
    if not source.segments or source.segments[0].format.seq_length == format.seq_length:
        return
    rest = _rest(source)
    source.restart()
    if rest is not None and rest.tokens > format.seq_length:
        source.add(rest, None, format)


def _rest(source: SourceOrder) -> Pieces | None:
    """What is left of the segment that is partly taken; None if none is."""
    taken = source.taken
    for segment in source.segments:
        if taken < len(segment):
            return rest_of(segment, taken, source.cache) if taken else None
        taken -= len(segment)
    return None


def rest_of(segment: GPTDataset, taken: int, cache: IndexCache) -> Pieces:
    """The parts of the token stream that are no inputs of the first `taken` samples, as pieces of documents in the
    order of the stream. They are index files too, which one process of a node makes."""
    made_of = {"segment": segment.fingerprint, "taken": taken}
    names = ("documents", "starts", "lengths")
    documents, starts, lengths = cache.arrays(names, "Pieces", made_of, lambda: _pieces(segment, taken))
    return Pieces(documents, starts, lengths, content_hash(made_of))


def _pieces(segment: GPTDataset, taken: int) -> tuple[NDArray, NDArray, NDArray]:
    length, index = segment.format.seq_length, segment.index
    lengths = segment.indexed.lengths if segment.pieces is None else segment.pieces.lengths
    ends = np.cumsum(lengths[index.document_index], dtype=np.int64)
    begins = np.append(0, ends[:-1])
    numbers = np.sort(index.shuffle_index[taken:]).astype(np.int64)
    left = np.append(numbers, segment.samples)  # the last: what is behind all samples
    first = np.flatnonzero(np.diff(left, prepend=-2) != 1)  # of each run of neighbouring samples
    runs, stops = left[first] * length, np.append((left[first[1:] - 1] + 1) * length, ends[-1])
    run = np.searchsorted(runs, begins, side="right") - 1
    inside = (run >= 0) & (begins < stops[run])
    starts = np.unique(np.concatenate((runs, begins[inside])))
    where = np.searchsorted(ends, starts, side="right")
    sizes = np.minimum(ends[where], stops[np.searchsorted(runs, starts, side="right") - 1]) - starts
    documents, offsets = index.document_index[where].astype(np.int64), starts - begins[where]
    if segment.pieces is not None:
        documents, offsets = segment.pieces.documents[documents], offsets + segment.pieces.starts[documents]
    return documents, offsets, sizes
