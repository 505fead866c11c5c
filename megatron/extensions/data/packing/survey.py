"""How well the documents of a data set fill samples, and how equal the work of replicas is: a line of the log."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import StepShape
from megatron.extensions.data.packing.dealing import deal, imbalance, pairs_of
from megatron.extensions.data.packing.flags import PackingConfig
from megatron.extensions.data.packing.order import Packed, Rounds, Waste, round_of

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
    if step is None or step.replicas == 1 or (found := balance(packed, seq_length, step, STEPS)) is None:
        return line
    before, after = found
    how = "as dealt" if options.balance_packed_samples else "with --balance-packed-samples"
    return f"{line}; {work_line(before, after, how)}"


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
