"""Which optimizer states are in host memory, and what passes through it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.param_layout import ALIGNMENT, BucketPlace

HOST_CHUNK = 2**23
"""Elements of offloaded states that are updated at a time, while gradients of the next ones are copied to the host."""

HOST_SLOTS = 2
"""Chunks of gradients and parameters in host memory at a time: one is updated, the other one is copied."""


def host_ranges(config: OptimizerConfig, owned: Mapping[BucketPlace, int]) -> dict[BucketPlace, list[range]]:
    """The first elements that a rank owns of each bucket, whose states are in host memory, in ranges of at most
    `HOST_CHUNK`.

    `config.host_fraction` of all elements, in whole blocks of `ALIGNMENT`. Buckets are taken in the order of `owned`,
    in which backward completes them, so that what the next forward pass needs first is updated on the device. At most
    one bucket has states in both places."""
    left = round(config.host_fraction * sum(owned.values()) / ALIGNMENT) * ALIGNMENT
    found = {}
    for place, numel in owned.items():
        cut = min(left, numel)
        found[place] = [range(at, min(at + HOST_CHUNK, cut)) for at in range(0, cut, HOST_CHUNK)]
        left -= cut
    return found


def host_slots(sizes: Sequence[int]) -> tuple[int, int]:
    """(number, elements) of the slots in host memory that gradients and parameters of ranges of these sizes pass
    through."""
    return min(HOST_SLOTS, len(sizes)), max(sizes, default=0)
