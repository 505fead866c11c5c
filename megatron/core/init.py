"""Weight initialization that is bit-identical for every layout.

Each value depends on (seed, parameter name, position in the global tensor) only, so that runs of different layouts can
be compared number by number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megatron.core.boxes import boxes_of_flat_range, overlap
from megatron.core.param_meta import ParamMeta
from megatron.core.seeds import site_key

BLOCK = 2**20
"""Consecutive elements of a global tensor that are drawn from one generator."""


@torch.no_grad()
def initialize_parameters_(params: Iterable[Tensor], seed: int, coords: Mapping[str, tuple[int, int]]) -> None:
    """Initializes parameters by their `meta.init`. `coords` maps axis -> (rank, size), as `ParallelState.coords`.

    Bit-identical for every layout and device type. Temporary memory is one block.
    """
    for param in params:
        meta: ParamMeta = param.meta  # type: ignore[attr-defined]
        offset, shape = meta.box(coords)
        assert tuple(param.shape) == shape, f"{meta.name} is {tuple(param.shape)} and should be {shape}"
        if meta.init.kind == "normal":
            _fill_normal_(param, meta, offset, seed)
        elif meta.init.kind in ("zeros", "ones"):
            param.fill_(float(meta.init.kind == "ones"))
        else:
            raise ValueError(f"{meta.name}: Init kind {meta.init.kind!r} is none of normal, zeros, ones")


def _fill_normal_(local: Tensor, meta: ParamMeta, offset: tuple[int, ...], seed: int) -> None:
    """Draws the blocks of the global tensor that overlap the box of `local`, and copies the common parts."""
    origin = (0,) * len(meta.global_shape)
    for start in range(0, meta.numel, BLOCK):
        stop = min(start + BLOCK, meta.numel)
        block = None
        for box in boxes_of_flat_range(origin, meta.global_shape, start, stop):
            common = overlap(box.offset, box.shape, offset, local.shape)
            if common is None:
                continue
            if block is None:
                block = _normal_block(seed, meta.name, start // BLOCK, stop - start, meta.init.std)
            in_box, in_local = common
            local[in_local].copy_(block[box.start - start : box.stop - start].view(box.shape)[in_box])


def _normal_block(seed: int, name: str, index: int, length: int, std: float) -> Tensor:
    generator = torch.Generator().manual_seed(site_key(seed, f"{name}/{index}"))
    return torch.empty(length, dtype=torch.float32).normal_(0.0, std, generator=generator)
