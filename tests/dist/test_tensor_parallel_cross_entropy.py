"""Tests that compare cross entropy over a sharded vocabulary with torch's cross entropy over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import collectives as mappings
from megatron.core.parallel_state import Axis, initialize_model_parallel
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from tests.harness import run_world

S, B, V = 5, 3, 32


def example(dtype: torch.dtype, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random logits, labels and loss weights. One label is the last token of the vocabulary, and one loss weight
    is zero."""
    generator = torch.Generator().manual_seed(4)
    logits = 3 * torch.randn(S, B, V, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, vocab_size, (S, B), generator=generator)
    labels[0, 0] = vocab_size - 1
    weights = torch.rand(S, B, dtype=torch.float64, generator=generator)
    weights[2, 1] = 0
    return logits.to(dtype), labels, weights


def oracle(dtype: torch.dtype, vocab_size: int, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the losses and the gradient of the logits in fp64, without the padding columns."""
    logits, labels, weights = example(dtype, vocab_size)
    logits = logits.double().requires_grad_()
    real = logits[..., :vocab_size]
    loss = F.cross_entropy(real.flatten(0, 1), labels.flatten(), reduction="none").view(S, B)
    loss = loss + z_loss * real.logsumexp(-1).square()
    (loss * weights).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


def parallel(rank: int, size: int, dtype: torch.dtype, vocab_size: int, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    tp = initialize_model_parallel(size).tp
    logits, labels, weights = example(dtype, vocab_size)
    local = mappings.local_slice(logits, tp, -1).clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(local * 1, labels, tp, vocab_size, z_loss_coeff=z_loss)
    (loss * weights).sum().backward()
    assert local.grad is not None and local.grad.dtype == dtype
    return loss.detach(), mappings.all_gather(local.grad, tp, -1)


@pytest.mark.parametrize("size", [1, 4])
# If 14 tokens are sharded over four ranks, one rank has some padding columns and two ranks have only padding.
@pytest.mark.parametrize(("vocab_size", "z_loss"), [(V, 0.0), (27, 0.1), (14, 0.0)])
def test_losses_and_gradients_match_torch(size: int, vocab_size: int, z_loss: float) -> None:
    loss, grad = oracle(torch.float64, vocab_size, z_loss)
    for rank_loss, rank_grad in run_world(size, parallel, torch.float64, vocab_size, z_loss):
        torch.testing.assert_close(rank_loss, loss, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(rank_grad, grad, rtol=1e-12, atol=1e-14)
        assert not rank_grad[..., vocab_size:].any()
        assert not rank_grad[2, 1].any()


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, 2e-6), (torch.bfloat16, 8e-3), (torch.float16, 1e-3)])
def test_low_precision_reduces_in_fp32(dtype: torch.dtype, eps: float) -> None:
    loss, grad = oracle(dtype, 27)
    for rank_loss, rank_grad in run_world(2, parallel, dtype, 27):
        assert rank_loss.dtype == torch.float32
        torch.testing.assert_close(rank_loss.double(), loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(rank_grad.double(), grad, rtol=eps, atol=eps / 100)


def losses(*args: Any) -> Tensor:
    return vocab_parallel_cross_entropy(*args, Axis(), V)


def test_gradients_pass_gradcheck_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels, _ = example(torch.float64, V)
    assert torch.autograd.gradcheck(losses, (logits.requires_grad_(), labels))
    whole = losses(logits, labels)
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK", 3 * V)
    assert torch.equal(losses(logits, labels), whole)
    assert torch.autograd.gradcheck(losses, (logits, labels))


def test_large_logits_do_not_overflow() -> None:
    logits, labels, _ = example(torch.float32, V)
    shifted = losses(logits + 1e4, labels)
    torch.testing.assert_close(shifted, losses(logits, labels), rtol=0, atol=5e-3)
    assert losses(torch.full((1, 1, V), -1e30), torch.zeros(1, 1, dtype=torch.long)).item() == pytest.approx(3.4657359)


def test_the_gradient_overwrites_the_logits() -> None:
    leaf, labels, _ = example(torch.float32, V)
    leaf.requires_grad_()
    logits = leaf * 1
    place = logits.data_ptr()
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    loss = losses(logits, labels).sum()
    loss.backward(retain_graph=True)
    assert seen == [place]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_leaves_and_views_are_not_overwritten() -> None:
    leaf, labels, _ = example(torch.float32, V)
    before = leaf.clone()
    leaf.requires_grad_()
    for logits in (leaf, leaf.view(S, B, V), leaf[..., :]):
        losses(logits, labels).sum().backward()
        assert torch.equal(leaf.detach(), before)


@pytest.mark.parametrize("bad", [-100, -1, 27])
def test_a_label_outside_the_vocabulary_is_an_error(bad: int) -> None:
    logits, labels, _ = example(torch.float32, 27)
    labels[1, 1] = bad
    with pytest.raises(ValueError, match=r"labels must be in \[0, 27\).*found ids from"):
        vocab_parallel_cross_entropy(logits, labels, Axis(), 27)
