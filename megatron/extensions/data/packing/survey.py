"""Log line about the padding and the work balance of packed samples."""

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
"""Maximum number of micro-batches for which `survey_line` evaluates the division over context-parallel ranks."""

SURVEYED = 1 << 17
"""Number of documents, from the beginning of a data set, for which `survey_line` evaluates packing."""

STEPS = 8
"""Maximum number of steps for which `survey_line` evaluates the work balance between replicas."""


def survey_line(options: PackingConfig, lengths: NDArray | None, seq_length: int, step: StepShape | None) -> str:
    """Return a log line with the share of padding, the number of documents that are split between samples, and the work
    balance between replicas. The line describes only the first `SURVEYED` documents.

    Args:
        options: Packing options.
        lengths: Document lengths, or None if the documents are not tokenized yet.
        seq_length: Number of input tokens per sample. The label of the last token is not counted.
        step: Shape of a step, such as its number of samples and its micro-batch size, or None if it is unknown.
    """
    if lengths is None:
        return "best-fit packing: the share of padding is unknown until the documents are tokenized"
    some = lengths[:SURVEYED]
    rounds = Rounds.of(some, range(len(some)), seq_length, options.packing_window)
    packed = round_of(some, rounds, seq_length, seed=0, number=1)
    line = f"best-fit packing: {Waste.of(packed, seq_length)}"
    if step is None:
        return line
    how = "as assigned" if options.balance_packed_samples else "with --balance-packed-samples"
    if step.replicas > 1 and (found := balance(packed, seq_length, step, STEPS)) is not None:
        line += f"; {work_line(*found, how)}"
    if step.context_ranks > 1:
        divider = Divider(options.hybrid_context_parallel, options.max_seqlen_per_dp_cp_rank)
        divided = options.hybrid_context_parallel or options.balance_packed_samples
        told = context_imbalances(packed, seq_length, step, divider, MICRO_BATCHES)
        if told:
            before, after, _ = mean_imbalances(told)
            line += f"; {context_line(before, after, 'with the division by work' if divided else how)}"
    return line


def context_imbalances(
    packed: Packed, seq_length: int, step: StepShape, divider: Divider, most: int
) -> list[Imbalance]:
    """Return the work imbalance between context-parallel ranks in each micro-batch. The result contains the imbalance
    with the default division and with the division by `divider`.

    Args:
        packed: Samples.
        seq_length: Number of input tokens per sample. The label of the last token is not counted.
        step: Shape of a step: its number of samples, its number of replicas, and its micro-batch size.
        divider: Object that divides micro-batches over context-parallel ranks.
        most: Maximum number of micro-batches to evaluate.
    """
    size = step.micro_batch_size
    bounds = pairwise([0, *packed.ends[: most * size].tolist()])
    starts = [starts_of(packed.lengths[a:b].tolist(), seq_length) for a, b in bounds]
    found = []
    for first in range(0, len(starts) - size + 1, size):
        documents = tuple(starts[first : first + size])
        found.append(imbalance_of(divider.divided(documents, seq_length, step.context_ranks), documents, seq_length))
    return found


def starts_of(counts: Sequence[int], seq_length: int) -> tuple[int, ...]:
    """Return the positions in a sample at which its documents and its padding begin. `counts` contains the number of
    tokens of each document. The last token of a sample is only a label, so it is not an input position."""
    return tuple(start for start in accumulate(counts, initial=0) if start < seq_length)


def context_line(before: float, after: float, how: str = "with the division by work") -> str:
    """Return a log message with the ratio of the busiest context-parallel rank's work to the mean work per rank.
    `before` is the ratio with the default division, and `after` is the ratio with the division that `how` describes."""
    values = f"{before:.4g} with the default division, {after:.4g} {how}"
    return f"attention work of the busiest context-parallel rank relative to the mean: {values}"


def work_line(before: float, after: float, how: str = "as assigned") -> str:
    """Return a log message with the ratio of the busiest replica's work to the mean work per replica. `before` is the
    ratio with samples in their original order, and `after` is the ratio with the assignment that `how` describes."""
    values = f"{before:.4g} with samples in order, {after:.4g} {how}"
    return f"attention work of the busiest replica relative to the mean: {values}"


def balance(packed: Packed, seq_length: int, step: StepShape, most: int | None = None) -> tuple[float, float] | None:
    """Return the mean work imbalance between replicas for two assignments: the samples in their original order, and the
    balanced assignment by `deal`. Return None if there are not enough samples for one step.

    Args:
        packed: Samples.
        seq_length: Number of input tokens per sample. The label of the last token is not counted.
        step: Shape of a step: its number of samples, its number of replicas, and its micro-batch size.
        most: Maximum number of steps to evaluate; None for all.
    """
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
    """Return the ratio of the busiest replica's work to the mean work per replica for two assignments of a step's
    samples. In the first assignment, samples are in their original order. The second one is the balanced assignment by
    `deal`. `works` contains the attention work of each sample."""
    in_order = np.arange(len(works)).reshape(-1, replicas, micro_batch_size)
    return imbalance(works, in_order), imbalance(works, deal(works, replicas, micro_batch_size))
