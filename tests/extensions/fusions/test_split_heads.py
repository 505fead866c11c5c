"""Heads that are split at once are those of plain torch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.rotary import rotate_queries_and_keys, rotate_queries_and_keys_interleaved
from megatron.extensions.fusions.split_heads import split_heads
from tests.pure.test_regions import ANGLES, compiles, with_gradient


def split(x: Tensor, compiled: bool, rotates: bool, interleaved: bool = False, biased: bool = False) -> Tensor:
    """Of 4 channels, 2 rotary ones: a group has three heads of queries, as many gates, a key and a value. The first
    token's are the bias."""
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


@compiles
@pytest.mark.grid("name", ("split, biased rotary",), list(SPLITS))
def test_heads_split_at_once_are_the_plain_ones(name: str) -> None:
    x = torch.randn(5, 2, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, expected = (with_gradient(SPLITS[name], x, compiled) for compiled in (True, False))
    for mine, plain in zip(found, expected, strict=True):
        assert mine.dtype == plain.dtype and plain.abs().sum() > 0
        torch.testing.assert_close(mine, plain, rtol=1e-13, atol=1e-14)
