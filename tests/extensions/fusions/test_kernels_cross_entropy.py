"""Tests of losses that overwrite the logits with gradients. The plain-torch definition is compared with torch's loss,
and the Triton kernels are compared with the definition."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import compiled_regions, kernels
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.extensions.speed.fusions.kernels import cross_entropy as twins
from tests.triton_cases import apart, compiled

BF16, FP32 = torch.bfloat16, torch.float32


def example(dtype: torch.dtype, width: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return logits [7, width], one of which is far larger than the others, and labels that include the last token of
    the vocabulary."""
    torch.manual_seed(width)
    logits, labels = 4 * torch.randn(7, width), torch.randint(0, vocab_size, (7,))
    labels[0] = vocab_size - 1
    logits[1, vocab_size // 2], logits[2] = 300.0, -1e6
    return logits.to(dtype), labels


def losses_and_gradient(logits: Tensor, labels: Tensor, vocab_size: int, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return the losses and the logit gradient, computed by autograd in fp64."""
    leaf = logits.double().requires_grad_()
    real = leaf[:, :vocab_size]
    losses = F.cross_entropy(real, labels, reduction="none") + z_loss * real.logsumexp(-1).square()
    losses.sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("width", "vocab_size", "z_loss"), [(64, 64, 0.0), (64, 50, 0.0), (96, 90, 1e-3)])
def test_the_definition_matches_autograd(dtype: torch.dtype, width: int, vocab_size: int, z_loss: float) -> None:
    logits, labels = example(dtype, width, vocab_size)
    losses, gradient = losses_and_gradient(logits, labels, vocab_size, z_loss)
    found = twins.loss_and_gradient_twin_(logits, labels, vocab_size, z_loss)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    eps = 1e-5 if dtype == FP32 else 2.0**-7
    torch.testing.assert_close(logits.double(), gradient, rtol=eps, atol=eps / 100)
    assert not logits[:, vocab_size:].any()


@apart(interpret=True)
def test_interpreted_losses_and_gradients_match_the_definition() -> None:
    """Some rows are shorter than a block. Other rows span several blocks and end within a block. The number of rows
    exceeds the number of kernel programs."""
    from megatron.extensions.speed.fusions.kernels import cross_entropy_triton as kernels

    kernels.THREADS, kernels.EACH, kernels.WARPS = 16, 8, 1
    for dtype, (width, vocab_size), z_loss in product((FP32, BF16), ((64, 50), (512, 300), (384, 384)), (0.0, 1e-3)):
        logits, labels = example(dtype, width, vocab_size)
        expected = logits.clone()
        losses = twins.loss_and_gradient_twin_(expected, labels, vocab_size, z_loss)
        found = kernels.loss_and_gradient_(logits, labels, vocab_size, z_loss)
        torch.testing.assert_close(found, losses, rtol=2e-6, atol=2e-6)
        eps = 1e-5 if dtype == FP32 else 2.0**-7
        torch.testing.assert_close(logits.float(), expected.float(), rtol=eps, atol=1e-7)
        factors = torch.tensor([1.0, 0.0, 0.5, 1.0, -2.0, 0.0, 1.0])
        scaled, left = expected.clone(), expected.clone()
        cross_entropy.scale_rows_.__wrapped__(scaled, factors)
        left[1] = torch.nan  # the factor of this row is 0, so the kernel must not read its values
        kernels.scale_rows_(left, factors)
        torch.testing.assert_close(left.float(), scaled.float(), rtol=eps, atol=0)
        assert torch.equal(left[0], expected[0]) and not left[1].any()
    broken, labels = example(FP32, 64, 64)
    broken[3, 5] = torch.nan
    assert kernels.loss_and_gradient_(broken, labels, 64, 0.0).isnan().tolist() == [row == 3 for row in range(7)]


@apart(interpret=False)
def test_losses_compile_to_wide_loads_and_stores() -> None:
    from megatron.extensions.speed.fusions.kernels import cross_entropy_triton as kernels

    types = {"logits": "*bf16", "labels": "*i64", "losses": "*fp32", "x": "*bf16", "factors": "*fp32"}
    types |= dict.fromkeys(("n", "width", "columns"), "i32")
    constants = {"THREADS": kernels.THREADS, "EACH": kernels.EACH}
    for capability, z_loss in product((80, 90), (None, "fp32")):
        given = types | {"z_loss": z_loss}
        built = compiled(kernels.loss_and_gradient, given, constants, capability, num_warps=kernels.WARPS)
        # A thread reads 32 bytes of a block in each of the two passes.
        ptx = built.asm["ptx"]
        assert ptx.count("v4.b32") >= 6 and "ld.global.b16" in ptx and "ld.local" not in ptx
        block = {"BLOCK": kernels.THREADS * kernels.EACH}
        ptx = compiled(kernels.scale_row, types, block, capability, num_warps=kernels.WARPS).asm["ptx"]
        assert ptx.count("v4.b32") >= 4


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Make the loss compute gradients in the forward pass on the CPU, as on a GPU, and record the logits of each
    call."""
    found: list[Tensor] = []

    def noted(logits: Tensor, *args: object) -> Tensor:
        found.append(logits)
        return twin(logits, *args)  # type: ignore[arg-type]

    twin = twins.loss_and_gradient_twin_
    scaled = replace(twins.SCALE, run=twins.SCALE.plain)
    in_torch = {"loss_and_gradient_": replace(twins.LOSS, run=noted), "scale_rows_": scaled}
    monkeypatch.setattr(twins, "runs_triton", lambda x: True)
    monkeypatch.setattr(kernels, "_kernel", in_torch.__getitem__)
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    return found


def gradient_of(logits: Tensor, labels: Tensor, weights: Tensor, compiled: bool) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(leaf * 1, labels, Axis(), 50, compiled, 1e-3)
    (losses * weights).sum().backward()
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_the_forward_pass_computes_the_gradient_with_kernels(dtype: torch.dtype, made: list[Tensor]) -> None:
    """The test multiplies the losses with token weights, which include 0, 1 and other values."""
    logits, labels = example(dtype, 64, 50)
    for weights in (torch.ones(7, 1), torch.tensor([[1.0, 0.0, 0.5, 1.0, 2.0, 0.0, 1.0]]).t()):
        plain = gradient_of(logits[:, None], labels[:, None], weights, False)
        assert not made
        found = gradient_of(logits[:, None], labels[:, None], weights, True)
        assert len(made) == 1
        made.clear()
        torch.testing.assert_close(found, plain, rtol=1e-5 if dtype == FP32 else 2.0**-7, atol=1e-6)
        assert not found[1][weights[:, 0] == 0].any()


def test_shared_or_reused_logits_are_not_overwritten(made: list[Tensor]) -> None:
    logits, labels = example(FP32, 64, 64)
    # Losses in fp16 and fp64 do not launch the kernel.
    for dtype in (torch.float16, torch.float64):
        leaf = logits.to(dtype)[:, None].requires_grad_()
        vocab_parallel_cross_entropy(leaf * 1, labels[:, None], Axis(), 64, True).sum().backward()
    leaf = logits[:, None].requires_grad_()
    vocab_parallel_cross_entropy(leaf, labels[:, None], Axis(), 64, True).sum().backward()
    with torch.no_grad():
        kept = leaf * 1
        vocab_parallel_cross_entropy(kept, labels[:, None], Axis(), 64, True)
    assert torch.equal(kept, leaf) and not made


def test_a_second_backward_pass_is_refused(made: list[Tensor]) -> None:
    logits, labels = example(FP32, 64, 64)
    losses = vocab_parallel_cross_entropy(logits[:, None].requires_grad_() * 1, labels[:, None], Axis(), 64, True)
    losses.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        losses.sum().backward()
