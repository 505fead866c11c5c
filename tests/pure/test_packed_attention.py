"""Test that attention over packed sequences equals attention with the dense mask. In these tests, an implementation in
plain torch with the same arguments replaces the GPU kernel. The kernel itself is tested in
`tests/gpu/test_flash_tiles.py`."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megatron.core.attention import varlen as packed
from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal
from megatron.core.attention.tiles import Documents, document_starts
from megatron.core.attention.varlen import Lengths, Window, cumulative_lengths, packed_attention
from megatron.extensions.speed.fusions.attention.flash_kernels import FlashCPUKernel
from tests.pure.test_tile_attention import (
    DOCUMENTS,
    LENGTH,
    SCALE,
    SINKS,
    assert_equal_with_gradients,
    dense,
    mask,
    operands,
    varlen_backward,
    varlen_forward,
)


class Twin:
    """Plain-torch replacement for the GPU kernel. The replacement computes each sequence separately by the definition
    of attention. Keys and values must have equal widths."""

    def __init__(self) -> None:
        self.seen = list[Lengths]()
        self.contiguous = True
        """True if the rows of all gradients that the kernel has received so far were contiguous."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, window: Window) -> tuple[Tensor, ...]:
        starts = lengths[0].tolist()
        assert lengths[0].dtype == torch.int32 and starts[-1] == len(q) and q.shape[-1] == v.shape[-1]
        assert lengths[1] is lengths[0] and lengths[2:] == (max(b - a for a, b in pairwise(starts)),) * 2
        self.seen.append(lengths)
        return varlen_forward(q, k, v, *lengths, 0.0, window == (-1, 0), False, **settings(window))[:2]

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths, window: Window
    ) -> tuple[Tensor, ...]:
        self.contiguous &= grad.is_contiguous()
        assert grad.shape == kept[0].shape == qkv[0].shape
        return varlen_backward(grad, *qkv, *kept, *lengths, 0.0, window == (-1, 0), None, None, **settings(window))


def settings(window: Window) -> dict[str, float]:
    return {"scale": SCALE, "window_size_left": window[0], "window_size_right": window[1]}


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize(("groups", "sinks"), [(1, None), (4, None), (2, SINKS)], ids=["one", "four", "sinks"])
def test_packed_attention_equals_attention_with_the_dense_mask(
    groups: int, sinks: Tensor | None, window: int | None, documents: Tensor | None
) -> None:
    inputs = operands(groups)
    leaves = inputs if sinks is None else (*inputs, sinks)
    starts = None if documents is None else document_starts(documents.tolist())
    out = packed_attention(*inputs, starts, window, Twin(), sinks)  # type: ignore[arg-type]
    assert_equal_with_gradients(out, dense(*inputs, mask(window, documents), sinks=sinks), leaves, leaves, 1e-13)


def test_only_whole_samples_use_the_packed_kernel() -> None:
    kernel, twin = FlashCPUKernel(SCALE), Twin()
    inputs, starts = operands(2), document_starts(DOCUMENTS.tolist())
    expected = local_attention(*inputs, Causal(kernel, starts))
    kernel.packed = twin  # type: ignore[assignment]
    causal = Causal(kernel, starts)
    torch.testing.assert_close(local_attention(*inputs, causal), expected, rtol=1e-13, atol=1e-13)
    assert len(twin.seen) == 1
    q, k, v = inputs
    local_attention(q[4:9], k, v, causal, (range(4, 9),))
    assert len(twin.seen) == 1


def test_starts_are_copied_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []
    copy = packed.integers_on
    monkeypatch.setattr(packed, "integers_on", lambda *args: copies.append(args[1]) or copy(*args))
    packed._lengths.cache_clear()
    cumulative_lengths.cache_clear()
    twin = Twin()
    for _ in range(3):
        packed_attention(*operands(1), ((0, 5), (0,), (0, 1, 23)), None, twin).sum().backward()  # type: ignore[arg-type]
    assert copies == [(0, 5, LENGTH, 2 * LENGTH, 2 * LENGTH + 1, 3 * LENGTH - 1, 3 * LENGTH)]
    assert len({id(lengths[0]) for lengths in twin.seen}) == 1


def test_starts_of_a_single_sample() -> None:
    def starts(documents: Documents) -> list[int]:
        return packed._lengths(documents, 7, torch.device("cpu"))[0].tolist()

    assert starts(((0,),)) == [0, 7]
    assert starts(((0, 2), (0,))) == [0, 2, 7, 14]
