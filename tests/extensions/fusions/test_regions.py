"""Tests of compiled regions. The fused norm equals a sum followed by torch's norm. The compiled kernel that splits a
projection into heads gives the same heads as plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.dropout import dropout
from megatron.core.transformer.rotary import rotate_queries_and_keys, rotate_queries_and_keys_interleaved
from megatron.extensions.speed.fusions.fused_norm import DropoutMask, add_update, fused_norm
from megatron.extensions.speed.fusions.kernels.norms import Norm
from megatron.extensions.speed.fusions.split_heads import split_heads
from tests.pure import test_regions as regions
from tests.pure.test_regions import ANGLES, compiles

SAMPLES = torch.tensor([3, 8])


def of_dropout(x: Tensor, compiled: bool) -> Tensor:
    """Apply dropout to the second half of x and add it to the first half. Return the sine of the sum, concatenated with
    the RMS norm of the sum."""
    x, update, weight = *x.chunk(2, -1), x[0, 0, :20].sin()
    arguments = 0.3, 1234567, SAMPLES, 7
    if compiled:
        mask = DropoutMask.of(update, *arguments)
        total, z = fused_norm(x, update, Norm(weight, None, 1e-3, False, False), mask)
    else:
        total = x + dropout(update, *arguments)
        z = F.rms_norm(total, (20,), weight, 1e-3)
    return torch.cat((total.sin(), z), -1)


def sum_with_dropout(x: Tensor, compiled: bool) -> Tensor:
    """Split x into two halves, and return the first half plus dropout of the second."""
    x, update = x.chunk(2, -1)
    arguments = 0.3, 1234567, SAMPLES, 7
    if not compiled:
        return (x + dropout(update, *arguments)).sin()
    return add_update(x, update, DropoutMask.of(update, *arguments)).sin()


def with_norm(x: Tensor, compiled: bool, centered: bool, added: bool = True) -> Tensor:
    """Add the two halves of x, and return the sum and its normalized value. Both results are scaled by different
    factors, so that their gradients differ. With `compiled`, also check that the norm with `weight` equals the norm
    that adds 1 to `weight - 1`."""
    x, update, weight, bias = *x.chunk(2, -1), x[0, 0, :20].sin(), x[0, 1, :20].cos()
    if compiled:
        (total, normed), (_, same) = (
            fused_norm(x, update if added else None, Norm(w, bias if centered else None, 1e-3, centered, one))
            for w, one in ((weight, False), (weight - 1, True))
        )
        normed = (normed + same) / 2
    else:
        total = x + update if added else x
        normed = F.layer_norm(total, (20,), weight, bias, 1e-3) if centered else F.rms_norm(total, (20,), weight, 1e-3)
    return torch.cat((total.sin() if added else total * 3, normed), -1)


NORMS = {
    "norm": partial(with_norm, centered=False),
    "centered norm": partial(with_norm, centered=True),
    "norm alone": partial(with_norm, centered=False, added=False),
    "centered norm alone": partial(with_norm, centered=True, added=False),
    "norm of dropout": of_dropout,
    "sum with dropout": sum_with_dropout,
}


def split(x: Tensor, compiled: bool, rotates: bool, interleaved: bool = False, biased: bool = False) -> Tensor:
    """Split x into heads with 4 channels, and apply rotary embeddings to 2 of the 4 channels. Each query group has
    three query heads, three gates, a key head and a value head. The bias of each channel is twice the value of the
    first token."""
    x, counts = torch.cat((x, x.sin()), -1).unflatten(-1, (2, 8, 5))[..., :4], (3, 3, 1, 1)
    bias = x[0, 0] * 2 if biased else None
    tables = (ANGLES[..., :1].cos().to(x.dtype), ANGLES[..., :1].sin().to(x.dtype)) if rotates else ()
    if compiled:
        with_bias = x if bias is None or rotates else x + bias.detach()
        parts = split_heads(with_bias, counts, tables, bias, interleaved=interleaved, compiled=True)
        plain = split_heads(with_bias, counts, tables, bias, interleaved=interleaved)
        for part, twin in zip(parts, plain, strict=True):
            assert part is not None and twin is not None and part.shape == twin.shape
            assert part.is_contiguous() or not rotates
    else:
        q, gate, k, v = (part.flatten(2, 3) for part in (x if bias is None else x + bias).split(counts, 3))
        rotate = rotate_queries_and_keys_interleaved if interleaved else rotate_queries_and_keys
        q, k = rotate(q, k, *tables) if rotates else (q, k)
        parts = q, gate, k, v
    return torch.cat([part.flatten(2) * n for n, part in enumerate(parts, 1)], -1)  # type: ignore[union-attr]


SPLITS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "split": partial(split, rotates=False, biased=True),
    "split and rotary": partial(split, rotates=True),
    "split, biased rotary": partial(split, rotates=True, biased=True),
    "split and interleaved rotary": partial(split, rotates=True, interleaved=True),
}
regions.REGIONS |= NORMS | SPLITS


@compiles
@pytest.mark.grid("name", ("centered norm", "norm of dropout", "split, biased rotary"), [*NORMS, *SPLITS])
def test_a_compiled_region_matches_the_plain_one(name: str) -> None:
    regions.test_a_compiled_region_matches_the_plain_one(name)
