"""Placement of optimizer states in host memory, and the slots through which gradients and parameters pass. This module
does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.param_layout import ALIGNMENT, BucketPlace

HOST_CHUNK = 2**23
"""Offloaded elements that are updated together, while the gradients of the next ones are copied to the host."""

HOST_SLOTS = 2
"""Chunks of gradients and parameters in host memory at the same time: one is updated while the other is copied."""


def host_ranges(config: OptimizerConfig, owned: Mapping[BucketPlace, int]) -> dict[BucketPlace, list[range]]:
    """For each bucket, ranges of at most `HOST_CHUNK` of the first elements that a rank owns, whose states are in host
    memory.

    They are the fraction `config.host_fraction` of all elements, in whole blocks of `ALIGNMENT`. Buckets are taken in
    the order of `owned`, in which the backward completes them, so that the parameters that the next forward pass needs
    first are updated on the device. At most one bucket has states in both places."""
    left = round(config.host_fraction * sum(owned.values()) / ALIGNMENT) * ALIGNMENT
    found = {}
    for place, numel in owned.items():
        cut = min(left, numel)
        found[place] = [range(at, min(at + HOST_CHUNK, cut)) for at in range(0, cut, HOST_CHUNK)]
        left -= cut
    return found


def host_slots(sizes: Sequence[int]) -> tuple[int, int]:
    """(number, elements) of the slots in host memory for gradients and parameters of ranges of these sizes."""
    return min(HOST_SLOTS, len(sizes)), max(sizes, default=0)
