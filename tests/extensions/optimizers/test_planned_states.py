"""Planned bytes of states of Muon, in few bits and in host memory are those that are allocated."""

from __future__ import annotations

import pytest

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from tests.dist.toy import optimizer_config
from tests.extensions.planner.test_out_of_memory import report
from tests.extensions.planner.test_planned_memory import GPT, LLAMA, compare
from tests.harness import run_world

PACKED = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(GPT, "bf16"), (GPT, "fp64"), (LLAMA, "bf16"), (LLAMA, "fp32")],
    ids=["gpt bf16", "gpt fp64", "llama bf16", "llama fp32"],
)
@pytest.mark.parametrize(
    "optimizer",
    [
        optimizer_config(optimizer="muon"),
        optimizer_config(**PACKED, main_grads_dtype="bf16", exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16"),
        optimizer_config(
            **PACKED,
            main_params_dtype="fp16",
            exp_avg_dtype="bf16",
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=0.7,
        ),
        optimizer_config(param_group=("fc1 lr_mult=2",), optimizer_cpu_offload=True, optimizer_offload_fraction=0.3),
    ],
    ids=["muon", "remainders and fp8", "fp16 on the host", "groups on the host"],
)
def test_plan_equals_what_is_allocated(model: TransformerConfig, dtype: str, optimizer: OptimizerConfig) -> None:
    parallel = ModelParallelConfig(tensor_model_parallel_size=2, **{dtype: True})
    for planned, allocated in run_world(4, compare, model, parallel, optimizer):
        assert planned == allocated


def test_states_in_fewer_bits_are_named_where_memory_ran_out() -> None:
    assert "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16" in report("")
