"""Placement of optimizer states in host memory, and sizes of the host buffers (slots) for copies of gradients and
parameters. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.param_layout import ALIGNMENT, BucketPlace

HOST_CHUNK = 2**23
"""Maximum number of elements in a chunk. While the elements of one chunk are updated, the gradients of the next chunk
are copied to the host."""

HOST_SLOTS = 2
"""Number of host buffers (slots). Each slot holds one chunk of gradients or parameters. With two slots, one chunk is
updated while the other is copied."""


def host_ranges(config: OptimizerConfig, owned: Mapping[BucketPlace, int]) -> dict[BucketPlace, list[range]]:
    """Return the ranges of a rank's elements whose optimizer states are in host memory, keyed by bucket. A range has at
    most `HOST_CHUNK` elements.

    Together, the ranges contain the fraction `config.host_fraction` of all elements, rounded to a multiple of
    `ALIGNMENT`. The states of the first buckets in `owned` are placed in host memory. `owned` lists buckets in the
    order in which the backward pass completes their gradients. Therefore, the last buckets, which contain the
    parameters that the next forward pass needs first, are updated on the device. At most one bucket is split, with some
    of its states on the device and the others on the host."""
    left = round(config.host_fraction * sum(owned.values()) / ALIGNMENT) * ALIGNMENT
    found = {}
    for place, numel in owned.items():
        cut = min(left, numel)
        found[place] = [range(at, min(at + HOST_CHUNK, cut)) for at in range(0, cut, HOST_CHUNK)]
        left -= cut
    return found


def host_slots(sizes: Sequence[int]) -> tuple[int, int]:
    """Return the number of host buffers (slots), and the number of elements per slot. `sizes` contains the sizes of the
    ranges that are copied through the slots."""
    return min(HOST_SLOTS, len(sizes)), max(sizes, default=0)
