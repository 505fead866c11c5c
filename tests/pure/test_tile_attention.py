"""Test that, for every kernel, tiled attention gives the same result as attention with a dense mask."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.attention.context_parallel import local_attention
from megatron.core.attention.tile_kernels import Causal, Dropout, Kernel, TorchKernel
from megatron.core.attention.tiles import Tile, document_starts, rank_spans
from megatron.core.dropout import attention_dropout
from megatron.extensions.speed.fusions.attention import flash_kernels
from megatron.extensions.speed.fusions.attention.flash_kernels import Flash2, FlashCPUKernel, FlashCUDAKernel

SCALE = 0.4
LENGTH = 24
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 4 + [2] * 13, [0] * 24, [5] * 1 + [6] * 22 + [7] * 1])


def operands(groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(groups)
    # As in transformer layers, the operands are non-contiguous views of the output of one projection.
    qkv = torch.randn(LENGTH, 3, groups, 4 // groups + 2, 8, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = qkv.split((4 // groups, 1, 1), dim=3)
    return tuple(x.detach().requires_grad_() for x in (q.flatten(2, 3), k.squeeze(3), v.squeeze(3)))  # type: ignore[return-value]


class NarrowTiles(TorchKernel):
    """Kernel that limits tiles to five queries. Real kernels limit the tiles of long sequences."""

    most_queries = 5


class ShortDiagonals(FlashCPUKernel):
    """CPU kernel with diagonal tiles that are as short as for long sequences."""

    longest_diagonal = 3


SLOPES = torch.tensor([0.5, 0.25, 0.1, 2.0], dtype=torch.float64)


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    dropout: Dropout | None = None,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention according to its definition, with a softmax over the whole row and a score of -inf for masked keys. An
    attention sink is an additional score that takes part in the softmax but has no value."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) * SCALE
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    if slopes is not None:
        place = torch.arange(LENGTH)
        scores = scores + slopes[:, None, None] * (place - place[:, None])
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
    probs = scores.softmax(-1)[..., : k.shape[0]]
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
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])[:, None]
    return seen


SINKS = torch.tensor([0.5, -3.0, 0.0, 4.0], dtype=torch.float64, requires_grad=True)
MASKS = Dropout(0.3, 77, 8, torch.tensor([4, 9, 2]))
KERNELS: dict[str, Kernel] = {
    "flash": FlashCPUKernel(SCALE),
    "short": ShortDiagonals(SCALE),
    "torch": TorchKernel(SCALE),
    "narrow": NarrowTiles(SCALE),
    "alibi": NarrowTiles(SCALE, slopes=SLOPES),
    "capped": NarrowTiles(SCALE, cap=0.7, slopes=SLOPES),
    "dropout": NarrowTiles(SCALE, MASKS, SLOPES),
    "dropout, capped": NarrowTiles(SCALE, MASKS, cap=0.7),
}


def compare(
    kernel: Kernel, groups: int, window: int | None, documents: Tensor | None, sinks: Tensor | None = None
) -> None:
    """Compare a kernel with dense masked attention, both for all queries and for the queries of one context-parallel
    rank that has gathered all keys."""
    inputs = operands(groups)
    leaves = inputs if sinks is None else (*inputs, sinks)
    causal = Causal(kernel, None if documents is None else document_starts(documents.tolist()), window)
    added: dict[str, Any] = {name: getattr(kernel, name, None) for name in ("dropout", "slopes", "cap")}
    for spans in (None, *(rank_spans(LENGTH, rank, 3) for rank in range(3))):
        rows = list(range(LENGTH)) if spans is None else [place for span in spans for place in span]
        q, k, v = inputs
        found = local_attention(q if spans is None else q[rows], k, v, causal, spans, sinks=sinks)
        expected = dense(*inputs, mask(window, documents), sinks=sinks, **added)
        assert_equal_with_gradients(found, expected[rows], leaves, leaves, 1e-13)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_kernels_match_dense_masked_attention(
    kernel: Kernel, groups: int, window: int | None, documents: Tensor | None
) -> None:
    compare(kernel, groups, window, documents)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", ["flash", "narrow", "dropout, capped"])
def test_attention_with_sinks_matches_its_definition(name: str, window: int | None, documents: Tensor | None) -> None:
    compare(KERNELS[name], 2, window, documents, SINKS)


def test_a_sink_far_below_all_scores_has_no_effect() -> None:
    inputs, causal = operands(2), Causal(TorchKernel(SCALE))
    none = torch.full((4,), -1e4, dtype=torch.float64)
    torch.testing.assert_close(local_attention(*inputs, causal, sinks=none), local_attention(*inputs, causal))


@pytest.mark.parametrize(
    "kernel",
    [FlashCPUKernel(SCALE), TorchKernel(SCALE), TorchKernel(SCALE, slopes=SLOPES.float())],
    ids=["flash", "torch", "alibi"],
)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.06)])
def test_lower_precision_is_close_to_fp64(kernel: Kernel, dtype: torch.dtype, tol: float) -> None:
    inputs = operands(2, dtype)
    exact = tuple(x.detach().double().requires_grad_() for x in inputs)
    out = local_attention(*inputs, Causal(kernel, document_starts(DOCUMENTS.tolist()), 9))
    assert out.dtype == dtype
    expected = dense(*exact, mask(9, DOCUMENTS), slopes=getattr(kernel, "slopes", None))
    assert_equal_with_gradients(out, expected, inputs, exact, tol)


def test_biases_of_far_positions_are_fp32_in_16_bits() -> None:
    """At query positions above 100,000, the ALiBi biases of adjacent positions differ by less than the resolution of
    bfloat16."""
    kernel, first = TorchKernel(1.0, slopes=torch.tensor([0.5])), 100_000
    q, k = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16), torch.zeros(64, 1, 1, 8, dtype=torch.bfloat16)
    tile = Tile(None, range(1), range(64), first, first - 64, diagonal=False)
    _, (_, lse) = next(kernel.forward(q, k, k, [tile]))
    expected = (-0.5 * torch.arange(1, 65, dtype=torch.float64)).logsumexp(0)
    torch.testing.assert_close(lse.squeeze().double(), expected, rtol=1e-6, atol=0)


def test_no_whole_score_matrix_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With packed documents, no tile is larger than the longest document. A tile has at most as many queries as the
    kernel accepts. Scores of keys that follow the query are computed only in diagonal tiles."""
    sizes, original = list[tuple[int, int]](), TorchKernel._scores
    monkeypatch.setattr(
        TorchKernel, "_scores", lambda self, q, k: sizes.append((len(q), len(k))) or original(self, q, k)
    )
    documents = document_starts([[0] * 8 + [1] * 8 + [2] * 8])
    q, k, v = (x[:, :1] for x in operands(1))
    local_attention(q, k, v, Causal(TorchKernel(SCALE), documents)).sum().backward()
    assert sizes == [(8, 8)] * 6
    sizes.clear()
    local_attention(*operands(1), Causal(NarrowTiles(SCALE)))
    assert sizes == [(5, 5)] * 4 + [(4, 4)] + [(5, 5), (5, 10), (5, 15), (4, 20)]


def scores_of_sequence(q: Tensor, k: Tensor, scale: float, left: int, right: int) -> Tensor:
    """Return the attention scores [heads, n, m] according to the definition of FlashAttention for GPUs. Query i of n is
    aligned with key i + m - n of m. The query attends to this key, to `left` keys before it and to `right` keys after
    it, where -1 means all keys."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    at = torch.arange(len(q))[:, None] + len(k) - len(q)
    key = torch.arange(len(k))
    hidden = (key > at + right if right >= 0 else key < 0) | (key < at - left if left >= 0 else key < 0)
    return (torch.einsum("nhd,mhd->hnm", q, k) * scale).masked_fill(hidden, float("-inf"))


def varlen_forward(q, k, v, starts_q, starts_k, max_q, max_k, p, is_causal, debug, *, scale, **window):
    left, right = window["window_size_left"], window["window_size_right"]
    assert is_causal == ((left, right) == (-1, 0)) and p == 0
    out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    for (a, b), (c, d) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        assert b - a <= max_q and d - c <= max_k
        scores = scores_of_sequence(q[a:b], k[c:d], scale, left, right)
        values = v[c:d].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        lse[:, a:b] = scores.logsumexp(-1)
        out[a:b] = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)
    return out, lse, None, None, None


def varlen_backward(
    grad, q, k, v, out, lse, starts_q, starts_k, max_q, max_k, p, is_causal, state, unused, *, scale, **window
):
    left, right = window["window_size_left"], window["window_size_right"]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for (a, b), (c, d) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        queries, keys, values = (x.detach().requires_grad_() for x in (q[a:b], k[c:d], v[c:d]))
        with torch.enable_grad():
            scores = scores_of_sequence(queries, keys, scale, left, right)
            # Each row of scores is part of a longer row, so the log-sum-exp and the mean gradient of the whole row are
            # used.
            weights = (scores - lse[:, a:b, None]).exp()
            grad_weights = torch.einsum(
                "nhd,mhd->hnm", grad[a:b], values.repeat_interleave(q.shape[1] // k.shape[1], 1)
            )
            mean = (grad[a:b] * out[a:b]).sum(-1).t()[..., None]
            dq[a:b], dk[c:d] = torch.autograd.grad(scores, (queries, keys), (weights * (grad_weights - mean)).detach())
        per_head = torch.einsum("hnm,nhd->mhd", weights.detach(), grad[a:b])
        dv[c:d] = per_head.unflatten(1, (v.shape[1], -1)).sum(2)
    return dq, dk, dv


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "packed"])
@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("groups", [1, 4])
def test_packed_tiles_match_dense_masked_attention(
    groups: int, window: int | None, documents: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An implementation of the kernel's definition replaces the GPU kernel, and receives the same packed operands and
    windows."""
    monkeypatch.setattr(flash_kernels, "flash_attention_forward", varlen_forward)
    monkeypatch.setattr(flash_kernels, "flash_attention_backward", varlen_backward)
    compare(FlashCUDAKernel(Flash2(SCALE)), groups, window, documents)
