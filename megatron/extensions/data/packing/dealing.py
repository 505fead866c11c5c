"""Balanced assignment of the samples of a global batch to data-parallel replicas and micro-batches. This module does
not import torch.

Replicas wait for each other at the end of a step, so the slowest replica determines the step time. The work of a sample
of packed documents is its number of query-key pairs: a document of n tokens has n (n + 1) / 2 pairs. All other costs
are the same for every sample. The assignment does not change which samples a step trains on, so the sum of the
gradients is unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.dataset import Dataset
from megatron.core.datasets.sample_order import documents_of

SWAPS = 4
"""Maximum number of swaps in `equal_groups`, as a multiple of the number of groups."""


def pairs_of(counts: Sequence[int], seq_length: int) -> int:
    """Return the number of query-key pairs in a sample. The sample consists of documents with the token counts
    `counts`, followed by padding up to seq_length + 1 tokens. The last token is only a label and not an input."""
    sizes = [*counts, seq_length + 1 - sum(counts)]
    last = max(place for place, size in enumerate(sizes) if size)
    sizes[last] -= 1
    return sum(size * (size + 1) // 2 for size in sizes)


def equal_groups(works: NDArray[np.int64], groups: int) -> NDArray[np.int64]:
    """Divide items into groups of equal size and approximately equal work. `works` contains the work of each item.
    Return the item numbers of each group, [groups, size].

    Items are assigned to groups in descending order of work. Among the groups with fewer than `size` items, each item
    is assigned to the group with the least work. Afterwards, items of the group with the most work are swapped with
    items of other groups, as long as a swap reduces the maximum of the two groups' work."""
    size = len(works) // groups
    assert size * groups == len(works)
    members: list[list[int]] = [[] for _ in range(groups)]
    sums = [0] * groups
    for item in np.argsort(-works, kind="stable").tolist():
        group = min((group for group in range(groups) if len(members[group]) < size), key=lambda group: sums[group])
        members[group].append(item)
        sums[group] += int(works[item])
    found = np.array(members, np.int64).reshape(groups, size)
    for _ in range(SWAPS * groups):
        if not _swap(found, works):
            break
    return found


def _swap(groups: NDArray[np.int64], works: NDArray[np.int64]) -> bool:
    """Swap, in place, one item of the group with the most work for an item of another group. `works` contains the work
    of each item. The chosen swap minimizes the maximum of the two groups' work. Return False if no swap reduces the
    work of the group with the most work."""
    of_items = works[groups]
    sums = of_items.sum(1)
    heaviest = int(sums.argmax())
    less = of_items[heaviest][:, None, None] - of_items  # [size, groups, size]
    larger = np.maximum(sums[heaviest] - less, sums[:, None] + less)
    larger[:, heaviest] = sums[heaviest]
    item, group, other = np.unravel_index(int(larger.argmin()), larger.shape)
    if larger[item, group, other] >= sums[heaviest]:
        return False
    groups[heaviest, item], groups[group, other] = groups[group, other], groups[heaviest, item]
    return True


def deal(works: NDArray[np.int64], replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
    """Assign items, such as samples, to replicas and micro-batches. `works` contains the work of each item. Return the
    item numbers, [micro-batches, replicas, micro_batch_size].

    Work is balanced over replicas first, then over the micro-batches of each replica. The micro-batches of each replica
    are sorted by their work. With expert parallelism, replicas synchronize in every micro-batch, so this order reduces
    waiting."""
    found = []
    for items in equal_groups(works, replicas):
        batches = items[equal_groups(works[items], len(items) // micro_batch_size)]
        found.append(batches[np.argsort(-works[batches].sum(1), kind="stable")])
    return np.stack(found, axis=1)


def imbalance(works: NDArray[np.int64], dealt: NDArray[np.int64]) -> float:
    """Return the ratio of the busiest replica's work to the mean work per replica. `works` contains the work of each
    item, and `dealt` is an assignment in the form that `deal` returns."""
    sums = works[dealt].sum((0, 2))
    return float(sums.max() / max(float(sums.mean()), 1.0))


@dataclass(frozen=True)
class WorkDealer:
    """Callable that assigns samples to replicas so that all replicas have about the same number of query-key pairs."""

    seq_length: int

    def works(self, dataset: Dataset, samples: range) -> NDArray[np.int64]:
        """Return the attention work of each sample, which is its number of query-key pairs, [samples]. If the data set
        does not report the documents of its samples, each sample counts as a single document."""
        parts = (documents_of(dataset, number) for number in samples)
        lengths = ([count for _, _, count in each] for each in parts)
        return np.array([pairs_of(counts or [self.seq_length + 1], self.seq_length) for counts in lengths], np.int64)

    def __call__(self, dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
        """Return the numbers of the samples in each micro-batch of each replica, [micro-batches, replicas,
        micro_batch_size].

        Args:
            dataset: Data set that contains the samples.
            samples: Sample numbers of a step.
            replicas: Number of data-parallel replicas.
            micro_batch_size: Samples per micro-batch.
        """
        return samples.start + deal(self.works(dataset, samples), replicas, micro_batch_size)
