"""Batches of rows of about one length, the same plan on every rank. Integers only, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil

SHORTEST = 16
"""Batches are not made shorter than this."""

ROUND = 16
"""Micro-batches that go through the pipeline in one run of it, for each of its ranks."""


@dataclass(frozen=True)
class Round:
    """Micro-batches of one shape, run one after the other on each replica of the model."""

    length: int
    """Tokens of a row; shorter rows are padded on the right."""

    size: int
    """Rows of a micro-batch."""

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[replica][micro-batch]: numbers of its rows; at the end of a plan fewer than `size`, or none."""


def batch_lengths(longest: int, divisor: int) -> tuple[int, ...]:
    """Lengths that batches may have, ascending: `longest` halved as long as `divisor` divides it. Few of them, so that
    compiled kernels see few shapes."""
    found = [longest]
    while found[-1] % (2 * divisor) == 0 and found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


def plan_rounds(
    lengths: Sequence[int], allowed: Sequence[int], budget: int, replicas: int, per_round: int = ROUND
) -> Iterator[Round]:
    """Batches of at most `budget` tokens each, or of one row: the longest rows first. Neighbours in length lie in one
    batch, and batches are dealt out to the `replicas` in turn."""
    order = sorted(range(len(lengths)), key=lambda number: -lengths[number])

    def padded(number: int) -> int:
        return next(length for length in allowed if length >= lengths[number])

    for length, group in groupby(order, key=padded):
        rows = list(group)
        size = min(max(1, budget // length), _power_of_two(ceil(len(rows) / replicas)))
        batches = [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]
        batches += [()] * (-len(batches) % replicas)
        dealt = [batches[replica::replicas] for replica in range(replicas)]
        for start in range(0, len(dealt[0]), per_round):
            yield Round(length, size, tuple(tuple(each[start : start + per_round]) for each in dealt))


def _power_of_two(value: int) -> int:
    """The next one: where rows are few, few shapes of batches."""
    return 1 << (value - 1).bit_length()
