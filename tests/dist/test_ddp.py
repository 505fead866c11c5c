"""Tests of gradient buffers. The tests check the accumulated gradients, the precision of the accumulation, and the
errors that report misuse.

tests/parity/test_matrix.py compares the gradients with autograd's gradients under every layout.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import global_token_count
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import ParallelState, build_parallel_state
from megatron.core.param_meta import ParamMeta
from tests.dist.toy import finalize_model_grads, noise
from tests.harness import run_world

FP64 = ModelParallelConfig(fp64=True)
SHAPES = {"embedding.word_embeddings.weight": (11, 5), "decoder.linear.weight": (5, 5), "decoder.linear.bias": (5,)}
ROLES = dict(zip(SHAPES, ("embedding", "hidden", "bias"), strict=True))


class Model(nn.Module):
    """Model with a linear layer and tied embeddings. The output layer reuses the embedding weight, so the weight
    receives two gradients."""

    def __init__(self) -> None:
        super().__init__()
        for i, (name, shape) in enumerate(SHAPES.items()):
            param = nn.Parameter(noise(shape, name))
            param.meta = ParamMeta(name, shape, role=ROLES[name])
            self.register_parameter(f"p{i}", param)

    def forward(self, tokens, mask):
        """Return the sum of the losses of the tokens that `mask` selects."""
        word, weight, bias = self.parameters()
        logits = torch.tanh(word[tokens] @ weight.t() + bias) @ word.t()
        return (logits.logsumexp(-1) * mask).sum()


TOKENS, MASK = torch.arange(22).view(2, 11) % 11, torch.ones(2, 11, dtype=torch.float64)


def test_a_gradient_after_its_reduction_is_an_error():
    model = Model()
    ddp = DistributedDataParallel(DDPConfig(1, overlap_grad_reduce=True), FP64, ParallelState(), [model])
    for _ in range(2):  # from the second iteration on, buckets are reduced during the backward pass
        ddp.begin_step(1)
        model(TOKENS, MASK).backward()
        if started := ddp._started:
            with pytest.raises(AssertionError, match="got a gradient after its bucket was reduced"):
                model(TOKENS, MASK).backward()
        ddp.finish_grad_sync()
    assert started


def all_masked(rank, world):
    state = build_parallel_state(ParallelDims(dp=world), rank)
    model = Model()
    ddp = DistributedDataParallel(DDPConfig(), FP64, state, [model])
    model(TOKENS, MASK * 0).backward()
    finalize_model_grads(ddp, global_token_count((MASK * 0).sum(), state), state)
    assert all(torch.equal(b.grad_data, torch.zeros_like(b.grad_data)) for b in ddp.buffers)


def test_a_batch_without_valid_tokens_has_zero_gradients():
    run_world(2, all_masked)


def test_several_modules_share_buffers_and_parameters():
    first, second = Model(), nn.Module()
    for i, param in enumerate(list(first.parameters())[:2]):
        second.register_parameter(f"again{i}", param)
    frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
    second.register_parameter("frozen", frozen)
    values = [param.detach().clone() for param in first.parameters()]
    ddp = DistributedDataParallel(DDPConfig(), FP64, ParallelState(), [first, second])
    assert [id(p) for p in ddp.params] == [id(p) for p in first.parameters()]
    assert all(torch.equal(param, value) for param, value in zip(ddp.params, values, strict=True))
    assert not hasattr(frozen, "main_grad")
    assert len(ddp.buffers) == 2


def test_main_gradients_of_16_bit_parameters_are_fp32():
    model = Model().bfloat16()
    for param, (name, shape) in zip(model.parameters(), SHAPES.items(), strict=True):
        param.meta = ParamMeta(name, shape, role=ROLES[name])
    ddp = DistributedDataParallel(DDPConfig(), ModelParallelConfig(bf16=True), ParallelState(), [model])
    for param in ddp.params:
        assert (param.dtype, param.main_grad.dtype) == (torch.bfloat16, torch.float32)
    bias = ddp.params[2]
    for _ in range(300):  # a sum in bf16 would stop growing at 256
        bias.sum().backward()
    assert torch.equal(bias.main_grad, torch.full((5,), 300.0))
