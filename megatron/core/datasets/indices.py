"""Order of samples. For the same documents, seed and sizes, the order is the same as in Megatron-LM. This module uses
only numpy and does not access the disk.

The document index shuffles the documents of a split over E epochs into one stream of tokens. The sample index divides
the stream: sample i consists of the s + 1 tokens i*s to (i+1)*s and shares its last token with sample i + 1. The
shuffle index lists the sample numbers in the order in which samples are drawn. The blend index lists samples that are
drawn from several datasets in proportion to the weights of the datasets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

INT32_MAX = 2**31 - 1
STREAM = 1 << 18
"""Number of documents of a token stream that are processed at a time. Draws of a blend are processed in parts of the
same size."""

# Constants for blends. BLOCK is the number of draws per block. LEAD is the number of additional draws before each
# block. These draws correct a wrong guess of the initial state. CELLS is the maximum number of counts (blocks times
# datasets)
# processed in parallel.
BLOCK = 1 << 10
LEAD = 1 << 7
CELLS = 1 << 16


def parse_split(split: str) -> tuple[float, float, float]:
    """Parse the value of `--split`. Return the shares of train, valid and test, normalized to sum to 1. The function
    raises ValueError if the value is invalid.

    Surrounding quotes, which a shell leaves in a variable, are ignored.
    """
    try:
        shares = [float(part) for part in split.strip("'\"").replace("/", ",").split(",")]
    except ValueError:
        raise ValueError(
            f"--split {split}: must be up to three numbers separated by commas; for example 969,30,1"
        ) from None
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(
            f"--split {split}: must be up to three shares, none negative and not all 0; for example 969,30,1"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    train, valid, test = (share / total for share in shares)
    return train, valid, test


def split_documents(shares: Sequence[float], documents: int) -> list[range]:
    """Return the range of documents of each split. The boundaries between splits are the cumulative shares times the
    number of documents, rounded."""
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    cuts = [round(bound * float(documents)) for bound in bounds]
    return [range(start, stop) for start, stop in pairwise(cuts)]


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs of a split. The plan also states whether the last epoch, which may be partial, is shuffled
    separately."""

    epochs: int
    final_apart: bool
    samples: int
    """Number of samples in all epochs."""

    samples_before_final: int
    """Number of samples in all epochs except the last."""


def plan_epochs(tokens: int, samples: int | None, seq_length: int) -> EpochPlan:
    """Return a plan with enough epochs of `tokens` tokens for `samples` samples. If `samples` is None, plan one epoch.

    If less than 80 % of the last epoch is needed, the last epoch is shuffled separately, so that all documents of the
    earlier epochs are used before the last epoch repeats some of them.
    """
    assert tokens > 0
    epochs = 1 if samples is None else max(1, -(-(samples * seq_length + 1) // tokens))
    total = (epochs * tokens - 1) // seq_length
    before_final = max(0, ((epochs - 1) * tokens - 1) // seq_length)
    final_apart = False
    if samples is not None and epochs > 1:
        final_apart = samples - before_final < int(0.8 * ((tokens - 1) // seq_length))
    return EpochPlan(epochs, final_apart, total, before_final)


class GPTIndex(NamedTuple):
    """Three arrays that determine, for each sample number, which documents the sample contains, and where it starts and
    ends in these documents."""

    document_index: NDArray
    """Document numbers [E * documents], in the order of the token stream."""

    sample_index: NDArray
    """Start of each sample, [samples + 1, 2]: the position of its first document in the document index, and the token
    offset in that document. If `finds_starts()` returns True, the array instead contains the number of stream tokens up
    to the end of each document, [E * documents].
    """

    shuffle_index: NDArray
    """Permutation of the samples, [samples]. Index i of the dataset returns sample shuffle_index[i] of the token
    stream."""

    def start(self, number: int, seq_length: int) -> tuple[int, int]:
        """Return where sample `number` of the stream starts: the position of its first document in the document index,
        and the token offset in this document."""
        if self.sample_index.ndim == 2:
            position, offset = self.sample_index[number].tolist()
            return position, offset
        token = number * seq_length
        # side="right" selects the document that contains the token and skips empty documents
        position = int(self.sample_index.searchsorted(token, side="right"))
        return position, token - (int(self.sample_index[position - 1]) if position else 0)


MANY_SAMPLES = 4
"""Maximum number of samples per document for which sample starts are stored. If a split has more samples per document,
its sample starts are computed on access.

Storing the start of a sample takes two numbers. If a split has many short samples, storing all starts would take more
memory and time than all other arrays, even if a run reads only a few samples.
"""


def finds_starts(plan: EpochPlan, documents: range) -> bool:
    """Return True if the index of a split stores where documents end instead of where samples start. In such an index,
    the start of a sample is found by binary search."""
    return plan.samples > MANY_SAMPLES * plan.epochs * len(documents)


def gpt_index_parts(
    lengths: NDArray, documents: range, plan: EpochPlan, seq_length: int, seed: int
) -> Iterator[NDArray]:
    """Yield the fields of a split's `GPTIndex` one by one, so that each field can be written while the next one is
    built.

    A single `RandomState(seed)` first shuffles the document index, and then the shuffle index.

    Args:
        lengths: Document lengths of the whole dataset.
        documents: Documents of the split.
        plan: Epochs of the split.
        seq_length: Tokens per sample.
        seed: Seed of both shuffles.
    """
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, plan, random)
    yield document_index
    if finds_starts(plan, documents):
        yield build_document_ends(lengths, document_index)
    else:
        yield build_sample_index(lengths, document_index, plan.samples, seq_length)
    yield build_shuffle_index(plan, random)


def build_document_index(documents: range, plan: EpochPlan, random: np.random.RandomState) -> NDArray:
    """Return the document numbers of all epochs in shuffled order. If the plan separates the last epoch, this epoch is
    shuffled separately."""
    dtype = np.int32 if documents.stop <= INT32_MAX else np.int64
    index = np.tile(np.arange(documents.start, documents.stop, dtype=dtype), plan.epochs)
    apart = (plan.epochs - 1) * len(documents) if plan.final_apart else len(index)
    random.shuffle(index[:apart])
    if plan.final_apart:
        random.shuffle(index[apart:])
    return index


def build_sample_index(lengths: NDArray, document_index: NDArray, samples: int, seq_length: int) -> NDArray:
    """Return the start of each sample in the document stream, followed by the end of the last sample: [samples + 1, 2].

    The stream is processed in parts to save memory. While one part is processed, a thread looks up the document lengths
    of the next part.

    Args:
        lengths: Document lengths of the dataset.
        document_index: Document numbers in stream order.
        samples: Number of samples.
        seq_length: Tokens per sample.
    """
    index = np.empty((samples + 1, 2), np.int64)
    tokens = done = 0
    for first, part, ends in _lengths_in_parts(lengths, document_index):
        ends += tokens
        tokens = int(ends[-1])
        stop = min(samples + 1, -(-tokens // seq_length))  # number of samples that start before the end of this part
        starts = np.arange(done, stop, dtype=np.int64) * seq_length
        # side="right" selects the document that contains the token and skips empty documents
        where = np.searchsorted(ends, starts, side="right")
        index[done:stop, 0] = where + first
        index[done:stop, 1] = starts - (ends[where] - part[where])
        done = stop
    assert done == samples + 1, f"{samples} samples of {seq_length} tokens do not fit into {tokens} tokens"
    return index


def build_document_ends(lengths: NDArray, document_index: NDArray) -> NDArray[np.int64]:
    """Return the number of stream tokens up to the end of each document, [E * documents]."""
    ends = np.empty(len(document_index), np.int64)
    tokens = 0
    for first, part, of_part in _lengths_in_parts(lengths, document_index):
        ends[first : first + len(part)] = of_part + tokens
        tokens += int(of_part[-1])
    return ends


def _lengths_in_parts(lengths: NDArray, document_index: NDArray) -> Iterator[tuple[int, NDArray, NDArray[np.int64]]]:
    """Divide the document stream into parts of `STREAM` documents. For each part of the stream, yield the position of
    the first document in the part, the lengths of all documents in the part, and the cumulative sums of these
    lengths."""

    def look_up(first: int) -> tuple[int, NDArray, NDArray[np.int64]]:
        part = lengths[document_index[first : first + STREAM]]
        return first, part, np.cumsum(part, dtype=np.int64)

    with ThreadPoolExecutor(1) as pool:
        coming = None
        for first in range(0, len(document_index), STREAM):
            ready, coming = coming, pool.submit(look_up, first)
            if ready is not None:
                yield ready.result()
        if coming is not None:
            yield coming.result()


def build_shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> NDArray:
    """Return the order in which samples are drawn.

    If the plan separates the last epoch, its samples are shuffled separately; otherwise, all samples are shuffled
    together.
    """
    dtype = np.uint32 if plan.samples < 2**32 - 2 else np.int64
    index = np.arange(plan.samples, dtype=dtype)
    if plan.final_apart:
        random.shuffle(index[: plan.samples_before_final])
        random.shuffle(index[plan.samples_before_final :])
    else:
        random.shuffle(index)
    return index


class BlendIndex(NamedTuple):
    """Two arrays that contain, for each sample of a blend, the number of its dataset and the number of the sample in
    that dataset."""

    dataset: NDArray[np.int16]
    sample: NDArray[np.int64]


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Build the index of a greedy blend of datasets. Each sample is drawn from the dataset that is furthest below its
    share. If several datasets tie, the first of them is used."""
    choice = _blend(weights, size)
    return BlendIndex(choice, _nth_of_each(choice, len(weights)))


def build_exhaustive_blend_index(sizes: Sequence[int]) -> BlendIndex:
    """Build the index of a greedy blend that contains every sample of every dataset once. The sizes of the datasets are
    the weights of the blend."""
    total = sum(sizes)
    filled = np.flatnonzero(np.array(sizes))
    limits = [sizes[number] for number in filled.tolist()]
    weights = [limit / total for limit in limits]
    choice = _blend(weights, total)
    # The limits have no effect until a draw exhausts a dataset, so keep all draws of the blend up to that point.
    spends = _nth_of_each(choice, len(limits)) == np.array(limits)[choice] - 1
    plain = int(spends.argmax()) + 1
    taken = np.bincount(choice[:plain], minlength=len(limits)).astype(np.float64)
    choice[plain:] = _draw(weights, range(plain, total), taken, limits)
    choice = filled.astype(np.int16)[choice]
    return BlendIndex(choice, _nth_of_each(choice, len(sizes)))


def _blend(weights: Sequence[float], size: int) -> NDArray[np.int16]:
    """Draw all samples of a blend. The draws are divided into blocks that are computed in parallel. A block depends on
    how many samples were drawn from each dataset before the block. The computation of a block starts from a guess of
    these numbers.

    Greedy drawing corrects a wrong guess within a few draws, so each block starts `LEAD` draws early. The guess was
    right if, after these early draws, each dataset has the same number of drawn samples as at the end of the previous
    block. In this case, all draws of the block are correct. If the guess was wrong, the samples of the block are drawn
    again one by one, starting with the correct numbers.
    """
    blocks = -(-size // BLOCK)
    choice = np.empty((blocks, BLOCK), np.int16)
    taken = np.zeros(len(weights))
    choice[0] = _draw(weights, range(BLOCK), taken)
    for first in range(1, blocks, side := max(1, CELLS // len(weights))):
        numbers = np.arange(first, min(first + side, blocks))
        choice[numbers], begin, end = _draw_side_by_side(weights, numbers * BLOCK)
        for number, began, ended in zip(numbers.tolist(), begin, end, strict=True):
            if np.array_equal(began, taken):
                taken = ended
            else:
                choice[number] = _draw(weights, range(number * BLOCK, (number + 1) * BLOCK), taken)
    return choice.reshape(-1)[:size]


def _draw_side_by_side(
    weights: Sequence[float], starts: NDArray[np.int64]
) -> tuple[NDArray[np.int16], NDArray[np.float64], NDArray[np.float64]]:
    """Compute the blocks of draws that begin at `starts`. Return three arrays: the draws [blocks, BLOCK], and the
    numbers of samples drawn from each dataset before each block and after each block, [blocks, datasets]."""
    share, draw = np.array(weights, np.float64), starts - LEAD
    quota = share * draw[:, None]
    taken = np.floor(quota)
    behind = (taken - quota).argsort(axis=1, kind="stable").argsort(axis=1)
    taken += behind < (draw - taken.sum(axis=1))[:, None]
    begin = taken
    choice = np.empty((BLOCK, len(starts)), np.int16)
    rows = np.arange(len(starts))
    for at in range(-LEAD, BLOCK):
        if at == 0:
            begin = taken.copy()
        error = share * np.maximum(starts + at, 1)[:, None]
        error -= taken
        best = error.argmax(axis=1)
        taken[rows, best] += 1.0
        if at >= 0:
            choice[at] = best
    return choice.T, begin, taken


def _draw(
    weights: Sequence[float], draws: range, taken: NDArray[np.float64], limits: Sequence[int] | None = None
) -> NDArray[np.int16]:
    """Draw samples one at a time, each from the dataset that is furthest below its share.

    `taken` contains the number of samples drawn from each dataset so far, and is updated in place. No samples are drawn
    from a dataset that has reached its limit.
    """
    share = np.array(weights, np.float64)
    limit = np.full(len(weights), np.inf) if limits is None else np.array(limits, np.float64)
    error = np.empty(len(weights), np.float64)
    choice = np.empty(len(draws), np.int16)
    share[taken >= limit] = -np.inf
    for at, i in enumerate(draws):
        np.multiply(share, float(max(i, 1)), out=error)
        error -= taken
        best = error.argmax()
        choice[at] = best
        taken[best] += 1.0
        if taken[best] == limit[best]:
            share[best] = -np.inf
    return choice


def _nth_of_each(choice: NDArray[np.int16], datasets: int) -> NDArray[np.int64]:
    """Return, for each draw, the number of earlier draws from the same dataset. To save memory, the draws are processed
    in parts."""
    sample = np.empty(len(choice), np.int64)
    before = np.zeros(datasets, np.int64)
    for first in range(0, len(choice), STREAM):
        part = choice[first : first + STREAM]
        order = np.argsort(part, kind="stable")
        counts = np.bincount(part, minlength=datasets)
        firsts = np.repeat(np.cumsum(counts) - counts - before, counts)
        sample[first : first + STREAM][order] = np.arange(len(part)) - firsts
        before += counts
    return sample
