"""Attention by tiles, whatever the kernel, is attention with the dense mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.context_parallel.flash import FlashCPUKernel
from megatron.core.context_parallel.kernels import Dropout, TorchKernel
from megatron.core.context_parallel.partition import rank_spans
from megatron.core.context_parallel.ring import Causal, local_attention
from megatron.core.context_parallel.tiles import document_starts
from megatron.core.tensor_parallel.random import attention_dropout
from megatron.core.transformer.dot_product import attention_mask

SCALE = 0.4
LENGTH = 24
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4 + [2] * 13, [0] * 24, [5] * 1 + [6] * 22 + [7] * 1])


def operands(groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(groups)
    # Views of one projection, as layers have them: not contiguous.
    qkv = torch.randn(LENGTH, 3, groups, 4 // groups + 2, 8, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = qkv.split((4 // groups, 1, 1), dim=3)
    return tuple(x.detach().requires_grad_() for x in (q.flatten(2, 3), k.squeeze(3), v.squeeze(3)))  # type: ignore[return-value]


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, dropout: Dropout | None = None) -> Tensor:
    """Attention as it is written down: softmax over the whole row, -inf where a key is not seen."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * SCALE
    probs = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    if dropout is not None:
        probs = attention_dropout(probs, dropout.p, dropout.key, dropout.sample_index, head_offset=dropout.head_offset)
    return torch.einsum("bhst,tbhd->sbhd", probs, v)


def assert_equal_with_gradients(
    actual: Tensor, expected: Tensor, actual_inputs: tuple[Tensor, ...], expected_inputs: tuple[Tensor, ...], tol: float
) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tol, atol=tol)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(9), dtype=expected.dtype)
    of_actual = torch.autograd.grad(actual, actual_inputs, grad.to(actual.dtype))
    of_expected = torch.autograd.grad(expected, expected_inputs, grad)
    for one, other in zip(of_actual, of_expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tol, atol=tol)


def mask(window: int | None, documents: Tensor | None) -> Tensor:
    seen = attention_mask(LENGTH, LENGTH, window, documents, documents, torch.device("cpu"))
    return seen if seen is not None else torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", [FlashCPUKernel(SCALE), TorchKernel(SCALE)], ids=["flash", "torch"])
def test_kernels(
    kernel: FlashCPUKernel | TorchKernel, groups: int, window: int | None, documents: Tensor | None
) -> None:
    inputs = operands(groups)
    starts = None if documents is None else document_starts(documents.tolist())
    expected = dense(*inputs, mask(window, documents))
    causal = Causal(kernel, starts, window)
    assert_equal_with_gradients(local_attention(*inputs, causal), expected, inputs, inputs, 1e-13)
    # The queries of a rank that has all keys.
    for rank in range(3):
        spans = rank_spans(LENGTH, rank, 3)
        rows = [place for span in spans for place in span]
        q, k, v = inputs
        part = local_attention(q[rows], k, v, causal, spans)
        assert_equal_with_gradients(part, expected_rows(inputs, window, documents, rows), inputs, inputs, 1e-13)


def expected_rows(
    inputs: tuple[Tensor, Tensor, Tensor], window: int | None, documents: Tensor | None, rows: list[int]
) -> Tensor:
    return dense(*inputs, mask(window, documents))[rows]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 5])
def test_dropout_has_the_mask_of_the_whole(window: int | None, documents: Tensor | None) -> None:
    inputs = operands(2)
    dropout = Dropout(0.3, 77, 8, torch.tensor([4, 9, 2]))
    starts = None if documents is None else document_starts(documents.tolist())
    out = local_attention(*inputs, Causal(TorchKernel(SCALE, dropout), starts, window))
    assert_equal_with_gradients(out, dense(*inputs, mask(window, documents), dropout), inputs, inputs, 1e-13)


@pytest.mark.parametrize("kernel", [FlashCPUKernel(SCALE), TorchKernel(SCALE)], ids=["flash", "torch"])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_lower_precision(kernel: FlashCPUKernel | TorchKernel, dtype: torch.dtype, tol: float) -> None:
    inputs = operands(2, dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    out = local_attention(*inputs, Causal(kernel, document_starts(DOCUMENTS.tolist()), 9))
    assert out.dtype == dtype
    assert_equal_with_gradients(out, dense(*exact, mask(9, DOCUMENTS)), inputs, exact, tol)


def test_no_matrix_of_the_whole_square_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tile of packed documents is the longest document."""
    sizes = []
    original = TorchKernel._scores
    monkeypatch.setattr(
        TorchKernel, "_scores", lambda self, q, k, tile: sizes.append((len(q), len(k))) or original(self, q, k, tile)
    )
    documents = document_starts([[0] * 8 + [1] * 8 + [2] * 8])
    q, k, v = (x[:, :1] for x in operands(1))
    local_attention(q, k, v, Causal(TorchKernel(SCALE), documents)).sum().backward()
    assert sizes == [(8, 8)] * 6
