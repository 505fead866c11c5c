"""Test that the first micro-batch of a step overwrites the gradients of the previous step instead of adding to zeros.

The parity matrix sets old gradients to NaN before each step, in one process and under all layouts.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from megatron.core.config.parallel import DDPConfig
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.weight_grad import add_product_, is_stale
from tests.gpt_cases import FP64, LLAMA, random_batch

EXPERTS = replace(LLAMA, num_layers=2, num_experts=8, moe_router_topk=1, moe_grouped_gemm=False)


class WithSpare(nn.Module):
    """Model with an additional parameter that is not used."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.model, self.spare = model, nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.spare.meta = ParamMeta("spare.weight", (5,), role="vector")  # type: ignore[attr-defined]


def gradients(overwrite: bool, together: bool = False) -> list[Tensor]:
    """Run two steps with two micro-batches each, and return the gradients of the second step. Between the steps, the
    gradients are set to NaN."""
    model = GPTModel(EXPERTS, FP64)
    model.decoder.layers[0].self_attention.linear_proj.weight.requires_grad_(False)
    whole = WithSpare(model)
    ddp = DistributedDataParallel(DDPConfig(ddp_bucket_size=5_000), FP64, ParallelState(), [whole])
    for step in range(2):
        for buffer in ddp.buffers:
            buffer.grad_data.fill_(torch.nan)
        ddp.begin_step(2, overwrite=overwrite)
        ddp._small_grads.enabled = together
        for number in range(2):
            model(None, random_batch(EXPERTS, seed=2 * step + number)).backward()
        ddp.finish_grad_sync()
        assert not any(is_stale(param) for param in ddp.params)
    assert not whole.spare.main_grad.any()  # type: ignore[attr-defined]
    return [buffer.grad_data.clone() for buffer in ddp.buffers]


@pytest.mark.parametrize("together", [False, True])
def test_gradients_are_bit_identical_to_sums_from_zeros(together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The padding of the gradient buffers must also be equal, because gradient norms include the padding. Depending on
    `together`, small gradients are processed in groups or individually."""
    expected = gradients(overwrite=False)
    monkeypatch.setattr(param_and_grad_buffer, "AT_A_TIME", 3)
    monkeypatch.setattr(param_and_grad_buffer, "LARGEST", 100)
    for found, zeroed in zip(gradients(True, together), expected, strict=True):
        assert torch.equal(found, zeroed)


@pytest.mark.parametrize("sums", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operands", [torch.float32, torch.float64, torch.bfloat16])
def test_an_overwriting_gemm_equals_one_that_adds_to_zeros(sums: torch.dtype, operands: torch.dtype) -> None:
    torch.manual_seed(1)
    dy, x = torch.randn(24, 40).to(operands), torch.randn(24, 16).to(operands)
    added, written = torch.zeros(40, 16, dtype=sums), torch.full((40, 16), torch.nan, dtype=sums)
    add_product_(added, dy, x)
    add_product_(written, dy, x, overwrite=True)
    assert torch.equal(written, added)
