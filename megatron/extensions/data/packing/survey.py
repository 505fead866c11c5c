"""How well the documents of a data set fill samples, and how equal the work of replicas is: a line of the log."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import StepShape
from megatron.extensions.data.packing.dealing import deal, imbalance, pairs_of
from megatron.extensions.data.packing.dividing import Divider, Imbalance, imbalance_of, mean_imbalances
from megatron.extensions.data.packing.flags import PackingConfig
from megatron.extensions.data.packing.order import Packed, Rounds, Waste, round_of

MICRO_BATCHES = 32
"""Micro-batches, at most, whose division over context-parallel ranks stands for that of all."""

SURVEYED = 1 << 17
"""Documents at the beginning of a data set whose packing stands for that of all."""

STEPS = 8
"""Steps, at most, whose work stands for that of all."""


def survey_line(options: PackingConfig, lengths: NDArray | None, seq_length: int, step: StepShape | None) -> str:
    """Padding, cut documents and the work of replicas, measured on the first of the documents of these lengths.
    `lengths` is None if the documents have no tokens yet."""
    if lengths is None:
        return "best-fit packing: the share of padding is unknown until the documents are tokenized"
    some = lengths[:SURVEYED]
    rounds = Rounds.of(some, range(len(some)), seq_length, options.packing_window)
    packed = round_of(some, rounds, seq_length, seed=0, number=1)
    line = f"best-fit packing: {Waste.of(packed, seq_length)}"
    if step is None:
        return line
    how = "as dealt" if options.balance_packed_samples else "with --balance-packed-samples"
    if step.replicas > 1 and (found := balance(packed, seq_length, step, STEPS)) is not None:
        line += f"; {work_line(*found, how)}"
    if step.context_ranks > 1:
        divider = Divider(options.hybrid_context_parallel, options.max_seqlen_per_dp_cp_rank)
        divided = options.hybrid_context_parallel or options.balance_packed_samples
        told = context_imbalances(packed, seq_length, step, divider, MICRO_BATCHES)
        if told:
            before, after, _ = mean_imbalances(told)
            line += f"; {context_line(before, after, 'as divided' if divided else how)}"
    return line


def context_imbalances(
    packed: Packed, seq_length: int, step: StepShape, divider: Divider, most: int
) -> list[Imbalance]:
    """How equal the work of context-parallel ranks is in at most `most` micro-batches, usually and by `divider`."""
    size = step.micro_batch_size
    bounds = pairwise([0, *packed.ends[: most * size].tolist()])
    starts = [starts_of(packed.lengths[a:b].tolist(), seq_length) for a, b in bounds]
    found = []
    for first in range(0, len(starts) - size + 1, size):
        documents = tuple(starts[first : first + size])
        found.append(imbalance_of(divider.divided(documents, seq_length, step.context_ranks), documents, seq_length))
    return found


def starts_of(counts: Sequence[int], seq_length: int) -> tuple[int, ...]:
    """Where the documents of `counts` tokens begin in a sample, and its padding. Its last token is only a label."""
    return tuple(start for start in accumulate(counts, initial=0) if start < seq_length)


def context_line(before: float, after: float, how: str = "as divided") -> str:
    """Text about the work of the context-parallel rank that has most, as multiples of the mean."""
    chunks = f"{before:.4g} times the mean in chunks of samples"
    return f"attention work of the busiest context rank: {chunks}, {after:.4g} {how}"


def work_line(before: float, after: float, how: str = "as dealt") -> str:
    """Text about the work of the replica that has most, as multiples of the mean."""
    return f"attention work of the busiest replica: {before:.4g} times the mean in order, {after:.4g} {how}"


def balance(packed: Packed, seq_length: int, step: StepShape, most: int | None = None) -> tuple[float, float] | None:
    """The largest sum of work of a replica as a multiple of the mean, in order and dealt by work: means over at most
    `most` steps. None if there are fewer samples than a step takes."""
    steps = len(packed.ends) // step.samples
    steps = steps if most is None else min(steps, most)
    if not steps:
        return None
    bounds = pairwise([0, *packed.ends[: steps * step.samples].tolist()])
    works = np.array([pairs_of(packed.lengths[a:b].tolist(), seq_length) for a, b in bounds], np.int64)
    found = [imbalances(each, step.replicas, step.micro_batch_size) for each in np.split(works, steps)]
    before, after = np.mean(found, axis=0).tolist()
    return before, after


def imbalances(works: NDArray[np.int64], replicas: int, micro_batch_size: int) -> tuple[float, float]:
    """The largest sum of work of a replica in a step, as a multiple of the mean: in order, and dealt by work."""
    in_order = np.arange(len(works)).reshape(-1, replicas, micro_batch_size)
    return imbalance(works, in_order), imbalance(works, deal(works, replicas, micro_batch_size))
