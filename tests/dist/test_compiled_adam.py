"""Tests that compare the function `adamw_` with torch's fused kernel. A training run compiles `adamw_`, but these tests
run the function without compilation."""

from __future__ import annotations

from math import nan

import pytest
import torch
from torch import Tensor

from megatron.core import compiled_regions
from megatron.core.optimizer.compiled_adam import CompiledAdamKernel
from megatron.core.optimizer.fused import AdamKernel
from megatron.core.parallel_state import ParallelState
from tests.dist.toy import build, run_step


def trained(dtype: str, compiled: bool, clip: float) -> list[Tensor]:
    """Take several optimizer steps, one of them with a NaN gradient, and return the parameters, main parameters and
    moments."""
    state, adam = ParallelState(), {"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_eps": 1e-6}
    ddp, optimizer = build(state, dtype=dtype, compiled=compiled, clip_grad=clip, **adam)
    ((kernel,),) = (chain.kernels for chain in optimizer.chains)
    assert type(kernel) is (CompiledAdamKernel if compiled and dtype != "fp64" else AdamKernel)
    for step in range(5):
        result, _ = run_step(ddp, optimizer, state, step, seed=nan if step == 3 else 1.0)
        assert result.skipped is (step == 3)
    assert optimizer.step_count == 4
    for shard in optimizer.shards:
        assert torch.equal(shard.bucket.owned_params, shard.main.to(shard.bucket.owned_params.dtype))
    tensors = [tensor for shard in optimizer.shards for tensor in (shard.main, *shard.states.values())]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_the_region_matches_the_fused_kernel(dtype: str, clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    plain, compiled = (trained(dtype, compiled, clip) for compiled in (False, True))
    for one, two in zip(plain, compiled, strict=True):
        assert one.any()
        torch.testing.assert_close(two, one, rtol=1e-6, atol=3e-8)
