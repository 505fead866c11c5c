"""Weights in MXFP4, as gpt-oss is published: read as bf16, which holds all of their values.

Of a matrix, 32 values along the last dim are a block: two 4-bit floats (E2M1) in a byte, the first one in the lower
half, and a power of two, whose exponent is stored plus 127 (Open Compute Project, Microscaling Formats 1.0, sections
5.3 and 6.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.extensions.hugging_face.safetensors_file import Sliceable

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the lower three bits. The fourth is the sign."""

BLOCK = 32
"""Values that share a power of two."""

BLOCKS, SCALES = "_blocks", "_scales"
"""Endings of the names of a tensor's two parts."""


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., n, 16] and scales [..., n] uint8 -> [..., 32 n] bf16"""
    values = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)])
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[pairs.int()], scales.int()[..., None] - 127).flatten(-2).bfloat16()


class Mxfp4Experts:
    """Matrices of experts [E, in, out], stored as blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""

    dtype = torch.bfloat16

    def __init__(self, blocks: Sliceable, scales: Sliceable) -> None:
        self.blocks, self.scales = blocks, scales

    @property
    def shape(self) -> tuple[int, ...]:
        """ValueError if both parts do not fit together."""
        experts, out, count, half = (*self.blocks.shape, 0, 0, 0, 0)[:4]
        uint8 = self.blocks.dtype == self.scales.dtype == torch.uint8
        if tuple(self.scales.shape) != (experts, out, count) or 2 * half != BLOCK or not uint8:
            shapes = f"{list(self.blocks.shape)} and {list(self.scales.shape)}"
            raise ValueError(f"blocks and scales of shapes {shapes} are not MXFP4")
        return experts, count * BLOCK, out

    def __getitem__(self, box: Any) -> Tensor:
        slices = (*(box if isinstance(box, tuple) else (box,)), *(slice(None),) * 3)[:3]
        experts, within, out = (slice(*each.indices(n)) for each, n in zip(slices, self.shape, strict=True))
        first = within.start // BLOCK
        stored = experts, out, slice(first, -(-within.stop // BLOCK))
        found = dequantized(self.blocks[(*stored, slice(0, BLOCK // 2))], self.scales[stored])
        return found[..., within.start - first * BLOCK : within.stop - first * BLOCK].transpose(1, 2)


def with_mxfp4(tensors: Mapping[str, Sliceable]) -> dict[str, Sliceable]:
    """The tensors of a file, with each pair of parts in MXFP4 as the one tensor that it stands for."""
    pairs = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    whole = [name for name in pairs if name + SCALES in tensors]
    parts = {name + ending for name in whole for ending in (BLOCKS, SCALES)}
    found = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return found | {name: Mxfp4Experts(tensors[name + BLOCKS], tensors[name + SCALES]) for name in whole}
