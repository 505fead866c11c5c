"""The order of samples: Megatron-LM's, for the same documents, seed and sizes. Numpy alone, nothing read from disk.

A split's documents, E times over and shuffled, make one stream of tokens (the document index). Sample i of that
stream is its tokens [i*s, (i+1)*s], s + 1 of them, the last shared with sample i + 1 (the sample index). Samples
are drawn in a shuffled order (the shuffle index). A blend draws from several datasets by weight (the blend index).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

INT32_MAX = 2**31 - 1
# Draws of a two-way blend that are computed at a time.
DRAWS = 1 << 22


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test from `--split`, normalised. Raises ValueError."""
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        raise ValueError(f"--split {split}: three numbers separated by commas are needed, as 969,30,1") from None
    if not 1 <= len(shares) <= 3 or min(shares) < 0 or not 0 < sum(shares) < float("inf"):
        raise ValueError(
            f"--split {split}: up to three shares (train, valid, test), none negative and not all zero; as 969,30,1"
        )
    shares += [0.0] * (3 - len(shares))
    total = sum(shares)
    train, valid, test = (share / total for share in shares)
    return train, valid, test


def split_documents(shares: Sequence[float], documents: int) -> list[range]:
    """The documents of each split, cut at rounded cumulative shares."""
    bounds = [0.0]
    for share in shares:
        bounds.append(bounds[-1] + share)
    cuts = [round(bound * float(documents)) for bound in bounds]
    return [range(start, stop) for start, stop in pairwise(cuts)]


@dataclass(frozen=True)
class EpochPlan:
    """How often a split is repeated, and whether its last, partly used, epoch is shuffled apart."""

    epochs: int
    final_apart: bool
    samples: int
    """In all epochs together."""

    samples_before_final: int
    """In all epochs but the last."""


def plan_epochs(tokens: int, samples: int | None, seq_length: int) -> EpochPlan:
    """Enough epochs of `tokens` tokens for `samples` samples (None: one epoch).

    A last epoch of which less than 80 % is needed is shuffled apart, so that its few documents do not take the
    place of others' first pass.
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
    """What turns a sample number into places in documents."""

    document_index: NDArray
    """[E * documents] document numbers, in the order of the token stream."""

    sample_index: NDArray
    """[samples + 1, 2]: position in the document index and offset in that document where a sample starts."""

    shuffle_index: NDArray
    """[samples] the stream's sample for each sample drawn."""


def build_gpt_index(lengths: NDArray, documents: range, plan: EpochPlan, seq_length: int, seed: int) -> GPTIndex:
    """The index of a split: `lengths` of the whole dataset, `documents` those of the split.

    One RandomState(seed) draws the document index first and the shuffle index after it.
    """
    random = np.random.RandomState(seed)
    document_index = build_document_index(documents, plan, random)
    sample_index = build_sample_index(lengths[document_index], plan.samples, seq_length)
    shuffle_index = build_shuffle_index(plan, random)
    return GPTIndex(document_index, sample_index, shuffle_index)


def build_document_index(documents: range, plan: EpochPlan, random: np.random.RandomState) -> NDArray:
    """Epochs of the documents, shuffled together, or the last one apart."""
    dtype = np.int32 if documents.stop <= INT32_MAX else np.int64
    once = np.arange(documents.start, documents.stop, dtype=dtype)
    parts = [plan.epochs - 1, 1] if plan.final_apart else [plan.epochs]
    shuffled = []
    for epochs in parts:
        part = np.tile(once, epochs)
        random.shuffle(part)
        shuffled.append(part)
    return np.concatenate(shuffled) if len(shuffled) > 1 else shuffled[0]


def build_sample_index(stream_lengths: NDArray, samples: int, seq_length: int) -> NDArray:
    """Where each sample starts in a stream of documents of these lengths; one row past the end."""
    ends = np.cumsum(stream_lengths, dtype=np.int64)
    starts = np.arange(samples + 1, dtype=np.int64) * seq_length
    index = np.empty((samples + 1, 2), np.int64)
    # side="right" takes the document that holds the token itself, past any empty ones.
    index[:, 0] = np.searchsorted(ends, starts, side="right")
    index[:, 1] = starts - (ends[index[:, 0]] - stream_lengths[index[:, 0]])
    return index


def build_shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> NDArray:
    """The order in which samples are drawn: all shuffled, or those before the last epoch and the rest apart."""
    dtype = np.uint32 if plan.samples < 2**32 - 2 else np.int64
    index = np.arange(plan.samples, dtype=dtype)
    if plan.final_apart:
        random.shuffle(index[: plan.samples_before_final])
        random.shuffle(index[plan.samples_before_final :])
    else:
        random.shuffle(index)
    return index


class BlendIndex(NamedTuple):
    """Which sample of which dataset each sample of a blend is."""

    dataset: NDArray[np.int16]
    sample: NDArray[np.int64]


def build_blend_index(weights: Sequence[float], size: int) -> BlendIndex:
    """Greedy blend: each draw goes to the dataset furthest below its share, the first one on a tie."""
    if len(weights) == 1:
        return BlendIndex(np.zeros(size, np.int16), np.arange(size, dtype=np.int64))
    choice = _blend_two(weights, size) if len(weights) == 2 else _draw(weights, range(size))
    return BlendIndex(choice, _nth_of_each(choice, len(weights)))


def build_exhaustive_blend_index(sizes: Sequence[int]) -> BlendIndex:
    """The same rule with the datasets' sizes as weights, over the datasets not yet spent, until all are."""
    total = sum(sizes)
    weights = [size / total for size in sizes]
    index = build_blend_index(weights, total)
    if (np.bincount(index.dataset, minlength=len(sizes)) == sizes).all():
        return index  # no spent dataset was ever furthest behind, so leaving them out changes nothing
    choice = _draw(weights, range(total), limits=sizes)
    return BlendIndex(choice, _nth_of_each(choice, len(sizes)))


def _blend_two(weights: Sequence[float], size: int) -> NDArray[np.int16]:
    """Two datasets: the count taken from the first has a closed form but for rounding.

    The closed form is a guess. The rule itself is then evaluated at every draw, on the counts guessed: where all
    draws agree the guess is right by induction, and from the first that does not, a stretch is drawn one by one.
    """
    choice = np.empty(size, np.int16)
    taken = np.zeros(2)
    start = 0
    while start < size:
        stop = min(size, start + DRAWS)
        step = np.maximum(np.arange(start, stop, dtype=np.float64), 1.0)
        # Taken from dataset 0 before draw i: one for each n with n <= w * m for some m < i.
        guess = np.floor(np.arange(start - 1, stop, dtype=np.float64) * weights[0]) + 1.0
        guess[0] = taken[0]
        guess = np.maximum.accumulate(guess)
        first, count = guess[:-1], np.arange(start, stop, dtype=np.float64)
        picked = (weights[1] * step - (count - first) > weights[0] * step - first).astype(np.int16)
        agree = np.diff(guess) == 1 - picked
        good = len(agree) if agree.all() else int(agree.argmin())
        choice[start : start + good] = picked[:good]
        ones = int(np.count_nonzero(picked[:good]))
        taken += (good - ones, ones)
        start += good
        if start < stop:
            stretch = range(start, min(size, start + 64))
            choice[start : stretch.stop] = _draw(weights, stretch, taken)
            start = stretch.stop
    return choice


def _draw(
    weights: Sequence[float],
    draws: range,
    taken: NDArray[np.float64] | None = None,
    limits: Sequence[int] | None = None,
) -> NDArray[np.int16]:
    """The rule, one draw after the other.

    `taken` counts the draws before and is brought up to date; a dataset that has reached its limit is out.
    """
    share = np.array(weights, np.float64)
    limit = np.full(len(weights), np.inf) if limits is None else np.array(limits, np.float64)
    taken = np.zeros(len(weights)) if taken is None else taken
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
    """For each draw how many earlier draws went to the same dataset."""
    order = np.argsort(choice, kind="stable")
    counts = np.bincount(choice, minlength=datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    sample = np.empty(len(choice), np.int64)
    sample[order] = np.arange(len(choice)) - firsts
    return sample
