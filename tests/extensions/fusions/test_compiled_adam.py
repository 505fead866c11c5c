"""AdamW as a compiled region, which runs uncompiled here, beside torch's fused kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron.core import compiled_regions
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import AdamW
from megatron.core.parallel_state import ParallelState
from megatron.extensions.fusions.compiled_adam import CompiledAdamW
from tests.gpt_cases import GPT

CONFIG = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, clip_grad=0.5)


def trained(dtype: str, compiled: bool, clip: float) -> list[Tensor]:
    """Parameters, main parameters and moments after steps of which one has a gradient that is no number."""
    parallel = ModelParallelConfig(**{dtype: True}, compile=compiled)
    model = GPTModel(replace(GPT, num_layers=1), parallel)
    ddp = DistributedDataParallel(DDPConfig(ddp_bucket_size=5_000), parallel, ParallelState(), [model])
    optimizer = DistributedOptimizer(replace(CONFIG, clip_grad=clip), ddp, ParallelState())
    (rule,) = optimizer._rules
    assert isinstance(rule, AdamW) and isinstance(rule, CompiledAdamW) is (compiled and dtype != "fp64")
    generator = torch.Generator().manual_seed(3)
    for step in range(5):
        ddp.zero_grad_buffer()
        for param in ddp.params:
            param.main_grad.copy_(torch.randn(param.shape, generator=generator))  # type: ignore[attr-defined]
        if step == 3:
            ddp.params[0].main_grad.view(-1)[3] = torch.nan  # type: ignore[attr-defined]
        result = optimizer.step(1e-2 / (step + 1), 0.1, factor=torch.tensor(1 / 7, dtype=torch.float64))
        assert result.skipped is (step == 3)
    assert optimizer.step_count == 4
    for shard in optimizer.shards:
        assert torch.equal(shard.bucket.owned_params, shard.main.to(shard.bucket.owned_params.dtype))
    tensors = [tensor for shard in optimizer.shards for tensor in (shard.main, *shard.states.values())]
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_the_region_makes_the_updates_of_the_fused_kernel(
    dtype: str, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    plain, compiled = (trained(dtype, compiled, clip) for compiled in (False, True))
    for one, two in zip(plain, compiled, strict=True):
        assert one.any()
        torch.testing.assert_close(two, one, rtol=1e-6, atol=3e-8)
