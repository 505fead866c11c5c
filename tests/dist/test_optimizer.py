"""Under any layout, the updates of the optimizer equal the updates of torch's optimizer in one process."""

from __future__ import annotations

import math

import pytest
import torch
import torch._dynamo  # torch.optim imports this module, so import it once before ranks are forked

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import global_token_count
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Update
from megatron.core.optimizer.optimizer import Rates
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import build_parallel_state
from tests.dist.toy import DECAY, KINDS, LR, Oracle, ToyStage, add_gradients, build, finalize_model_grads, run_step
from tests.harness import run_world

LAYOUTS = ParallelDims(dp=3), ParallelDims(tp=2, dp=2, ep=2, expt_tp=2)
"""Layouts that are tested here because the parity matrix does not contain them."""


def torch_optimizer(kind):
    if kind == "adam":
        return lambda groups: torch.optim.AdamW(groups, lr=LR, betas=(0.8, 0.95), eps=1e-6)
    return lambda groups: torch.optim.SGD(groups, lr=LR, momentum=0.7)


def compare_with_one_process(rank, world, dims, distributed, kind, clip):
    state = build_parallel_state(dims, rank)
    flags = {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6, "sgd_momentum": 0.7}
    ddp, optimizer = build(state, distributed, optimizer=kind, clip_grad=clip, **flags)
    oracle = Oracle(state, torch_optimizer(kind))
    norms = []
    for step in range(3):
        result, tokens = run_step(ddp, optimizer, state, step, seed=2.0 ** (10 * step))
        assert tokens == sum(10 + r for r in range(state.dp_cp.size))
        norm = oracle.step(step, tokens, clip, DECAY)
        assert result.grad_norm == pytest.approx(norm, rel=1e-13)
        assert not result.skipped
        assert clip == 0 or norm > clip
        norms.append(result.grad_norm)
        for param in ddp.params:
            torch.testing.assert_close(param.detach(), oracle.local(param.meta.name), rtol=1e-12, atol=1e-12)
    assert optimizer.step_count == 3
    return norms


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
@pytest.mark.parametrize(
    ("dims", "kind", "clip"), [*((dims, "adam", 0.5) for dims in LAYOUTS), (ParallelDims(dp=3), "sgd", 0.0)], ids=str
)
def test_updates_match_one_process(dims, kind, clip, distributed):
    """For any loss scale, the updates equal the updates in one process."""
    norms = run_world(dims.world_size, compare_with_one_process, dims, distributed, kind, clip)
    assert all(other == norms[0] for other in norms), "the norm must be bit-equal on all ranks"


def train_low_precision(rank, world, distributed):
    state = build_parallel_state(ParallelDims(dp=world), rank)
    ddp, optimizer = build(state, distributed, dtype="bf16", clip_grad=1.0)
    oracle = Oracle(state, lambda groups: torch.optim.AdamW(groups, lr=LR), torch.float32)
    with torch.no_grad():
        for param in oracle.params.values():
            param.copy_(param.bfloat16())
    for step in range(4):
        _, tokens = run_step(ddp, optimizer, state, step)
        oracle.step(step, tokens, 1.0, DECAY)
    for piece in optimizer.sharded_state():
        if piece.key == "main_param":
            expected = oracle.local(piece.meta.name).flatten()[piece.start : piece.stop]
            torch.testing.assert_close(piece.data, expected, rtol=1e-5, atol=1e-6)
    for param in ddp.params:
        assert param.dtype == torch.bfloat16
        torch.testing.assert_close(param.float(), oracle.local(param.meta.name), rtol=1e-2, atol=1e-3)
    return [param.detach().float() for param in ddp.params]


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
def test_bf16_has_fp32_main_parameters(distributed):
    ranks = run_world(3, train_low_precision, distributed)
    for other in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks[0], other, strict=True))


def bad_step(rank, world, distributed, dtype, kind, bad_rank, name):
    """Run four steps. In the third step, one rank has a non-finite gradient. The gradient contains Inf if the dtype is
    fp16, and NaN if the dtype is fp64."""
    state = build_parallel_state(ParallelDims(tp=2, dp=2), rank)
    scaler = {"initial_loss_scale": 64.0, "hysteresis": 1, "loss_scale_window": 2}
    ddp, optimizer = build(state, distributed, dtype=dtype, optimizer=kind, **scaler)
    seen = []
    for step in range(4):
        seed = optimizer.loss_scale / 16
        before = [piece.data.clone() for piece in optimizer.sharded_state()]
        params = [param.detach().clone() for param in ddp.params]
        ddp.zero_grad_buffer()
        add_gradients(ddp, state, step)
        for buffer in ddp.buffers:
            buffer.grad_data.mul_(seed)
        if step == 2 and rank == bad_rank:
            (param,) = [p for p in ddp.params if p.meta.name == name]
            param.main_grad.view(-1)[-1] = math.inf if dtype == "fp16" else math.nan
        finalize_model_grads(ddp, global_token_count(torch.tensor(10.0), state), state, seed)
        result = optimizer.step(Update(Rates(LR, DECAY)))
        seen.append((result.skipped, result.loss_scale))
        assert result.skipped or math.isfinite(result.grad_norm)
        same = [torch.equal(a, p.data) for a, p in zip(before, optimizer.sharded_state(), strict=True)]
        same += [torch.equal(a, p) for a, p in zip(params, ddp.params, strict=True)]
        assert all(same) if result.skipped else not all(same)
    return seen, optimizer.step_count


IN_A_SHARD = (3, "decoder.layers.0.mlp.linear_fc2.weight")
THAT_NO_NORM_COUNTS = (1, "decoder.layers.1.mlp.linear_fc2.bias")
"""A rank, and the name of a replicated parameter that this rank does not count in the gradient norm."""


@pytest.mark.parametrize("distributed", [True, False], ids=["zero1", "replicated"])
@pytest.mark.parametrize(
    ("dtype", "kind", "where"),
    [
        ("fp16", "adam", IN_A_SHARD),
        ("fp16", KINDS[-1], THAT_NO_NORM_COUNTS),
        ("fp64", "adam", THAT_NO_NORM_COUNTS),
        ("fp64", "sgd", IN_A_SHARD),
        ("fp64", KINDS[-1], IN_A_SHARD),
    ],
)
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(distributed, dtype, kind, where):
    scales = [64, 64, 128, 64] if dtype == "fp16" else [1] * 4
    expected = list(zip([False, False, True, False], scales, strict=True))
    for seen, updates in run_world(4, bad_step, distributed, dtype, kind, *where):
        assert (seen, updates) == (expected, 3)


def empty_stage(rank, world):
    """Run one step in which pipeline rank 1 has no layers and therefore no parameters. This rank must still take part
    in collectives."""
    state = build_parallel_state(ParallelDims(pp=world), rank)
    ddp, optimizer = build(state)
    assert bool(ddp.params) == (rank != 1)
    result, tokens = run_step(ddp, optimizer, state, 0, tokens=4 if rank == world - 1 else 0)
    assert tokens == 4
    assert optimizer.step_count == 1
    return result.grad_norm


def test_a_rank_without_parameters_takes_part_in_collectives():
    norms = run_world(3, empty_stage)
    assert norms[0] == norms[1] == norms[2] > 0


def test_both_configurations_must_agree():
    state = build_parallel_state(ParallelDims(), 0)
    parallel = ModelParallelConfig(fp64=True)
    other = OptimizerConfig(use_distributed_optimizer=False)
    ddp = DistributedDataParallel(DDPConfig(), parallel, state, [ToyStage(state)], other)
    with pytest.raises(ValueError, match="use_distributed_optimizer is True in OptimizerConfig and False"):
        DistributedOptimizer(OptimizerConfig(), ddp, state)
