"""The planned bytes of states are those of the tensors that a run allocates, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.param_layout import plan_buffers
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import freeze_parameters
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import build_parallel_state
from megatron.core.pipeline_parallel.stages import pipeline_stages
from megatron.extensions.planner.memory import buffer_bytes, states_of_rank
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.dist.toy import KINDS, optimizer_config
from tests.extensions import installed
from tests.harness import local_run, run_world
from tests.pure import test_param_layout as layouts

GPT = TransformerConfig(num_layers=3, hidden_size=40, num_attention_heads=4, seq_length=24, vocab_size=200)
LLAMA = replace(
    GPT,
    normalization="RMSNorm",
    swiglu=True,
    ffn_hidden_size=72,
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    group_query_attention=True,
    num_query_groups=2,
)
DDP = DDPConfig(ddp_bucket_size=5000)  # several buckets, so that their padding counts


def compare(
    rank: int,
    world_size: int,
    model: TransformerConfig,
    parallel: ModelParallelConfig,
    optimizer: OptimizerConfig,
    strategy: str | None = None,
) -> tuple[Any, Any]:
    """(planned, allocated) bytes of parameters, gradients, main parameters and moments, parameters held, and bytes in
    host memory."""
    dims = ParallelDims.from_config(parallel, world_size)
    state = build_parallel_state(dims, rank)
    stage, tied = pipeline_stages(model, parallel)[state.pp.rank], (0, 1) if dims.pp == 2 else ()
    ends = {"first": stage.first, "last": stage.last, "tied_stages": tied}
    built = GPTModel(model, parallel, state, layers=stage.layers, **ends)
    parameters = [parameter for parameter in built.parameters() if parameter.requires_grad]
    freeze_parameters([built], optimizer, state.world)
    options = replace(DDP, data_parallel_sharding_strategy=strategy)
    sums = getattr(torch, optimizer.gradients_dtype or "", None)
    ddp = DistributedDataParallel(
        options,
        parallel,
        state,
        [built],
        optimizer.use_distributed_optimizer,
        optimizer.group_of,
        optimizer.whole_roles,
        grad_dtype=sums,
    )
    built_optimizer = DistributedOptimizer(optimizer, ddp, state)
    shards = [shard for shard in built_optimizer.shards if not shard.on_host]
    plan = states_of_rank(model, parallel, optimizer, options, dims, state.pp.rank)
    allocated = (
        sum(buffer.param_data.nbytes for buffer in ddp.buffers)
        + sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad),
        sum(buffer.grad_data.nbytes for buffer in ddp.buffers),
        sum(shard.nbytes[0] for shard in shards),
        sum(shard.nbytes[1] for shard in shards),
        sum(parameter.numel() for parameter in parameters),
        built_optimizer.nbytes[1],
    )
    memory = plan.memory
    planned = (
        memory.parameters,
        memory.gradients,
        memory.main_parameters,
        memory.moments,
        plan.parameters,
        memory.host,
    )
    assert memory.total == sum(planned[:4]) and (memory.host > 0) == (optimizer.host_fraction > 0)
    assert built_optimizer.nbytes[0] == sum(planned[2:4])
    return planned, allocated


@pytest.mark.parametrize(
    ("model", "dtype"),
    [(GPT, "bf16"), (GPT, "fp64"), (LLAMA, "bf16"), (LLAMA, "fp32")],
    ids=["gpt bf16", "gpt fp64", "llama bf16", "llama fp32"],
)
@pytest.mark.parametrize(
    "optimizer",
    [
        OptimizerConfig(),
        OptimizerConfig(use_distributed_optimizer=False),
    ],
    ids=["zero1", "replicated"],
)
def test_plan_equals_what_is_allocated(model: TransformerConfig, dtype: str, optimizer: OptimizerConfig) -> None:
    parallel = ModelParallelConfig(tensor_model_parallel_size=2, **{dtype: True})
    for planned, allocated in run_world(4, compare, model, parallel, optimizer):
        assert planned == allocated


@pytest.mark.parametrize(
    ("optimizer", "strategy"), [("adam", "optim_grads_params"), *((kind, "optim_grads") for kind in KINDS[2:])]
)
def test_experts_over_their_own_groups(optimizer: str, strategy: str | None) -> None:
    model = replace(LLAMA, num_experts=8, moe_ffn_hidden_size=36, moe_layer_freq="2")
    parallel = ModelParallelConfig(
        tensor_model_parallel_size=2,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        bf16=True,
    )
    for planned, allocated in run_world(4, compare, model, parallel, OptimizerConfig(optimizer=optimizer), strategy):
        assert planned == allocated


@pytest.mark.parametrize("freeze", [None, (r"layers\.[01]\.", "word_embeddings")])
def test_pipeline_with_tied_embedding_and_sgd(freeze: tuple[str, ...] | None) -> None:
    parallel = ModelParallelConfig(pipeline_model_parallel_size=2, bf16=True)
    optimizer = OptimizerConfig(optimizer="sgd", freeze=freeze)
    for planned, allocated in run_world(4, compare, GPT, parallel, optimizer):
        assert planned == allocated


@pytest.mark.parametrize(
    ("dtype", "distributed", "optimizer", "expected"),
    [
        ("bfloat16", True, "adam", (2 * 448, 4 * 448, 4 * 192, 8 * 192)),
        ("bfloat16", False, "adam", (2 * 448, 4 * 448, 4 * 448, 8 * 448)),
        ("float32", True, "adam", (4 * 448, 4 * 448, 0, 8 * 192)),
        ("float32", True, "sgd", (4 * 448, 4 * 448, 0, 4 * 192)),
    ],
)
def test_bytes(dtype, distributed, optimizer, expected):
    config = OptimizerConfig(optimizer=optimizer, use_distributed_optimizer=distributed)
    params = [
        layouts.matrix("w", (10, 10)),
        layouts.matrix("e", (3, 50), expert=True),
    ]  # 192 over 3 ranks and 256 over 2
    found = buffer_bytes(plan_buffers(params, 3, 2, whole_roles=config.whole_roles), dtype, "float32", config)
    assert (found.parameters, found.gradients, found.main_parameters, found.moments) == expected
    assert found.total == sum(expected)


@pytest.mark.skipif(not installed("optimizers"), reason="optimizers is deleted")
def test_bytes_of_whole_matrices():
    """Matrices have one state, other parameters Adam's two: the last 64 of 192 over 3 ranks."""
    config = optimizer_config(optimizer="muon")
    params = [layouts.matrix("w", (10, 10)), layouts.matrix("e", (3, 50), expert=True), layouts.vector("norm", 4)]
    found = buffer_bytes(plan_buffers(params, 3, 2, whole_roles=config.whole_roles), "float32", "float32", config)
    sizes = found.parameters, found.gradients, found.main_parameters, found.moments
    assert sizes == (4 * 640, 4 * 640, 0, 4 * 192 + 8 * 64) and found.total == sum(sizes)


COMMON = (
    "--num-layers 7 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 --lr 1e-2 --mock-data "
    "--global-batch-size 4 --train-iters 1 --eval-iters 0 --num-workers 0 --bf16 --cpu --ddp-bucket-size 500"
)


def compare_stages(rank: int, world_size: int, flags: str) -> tuple[Any, Any]:
    """(planned, built): names of parameters in order, their elements, bytes of weights and gradients."""
    config = resolve(parse_args([*COMMON.split(), *flags.split()]), world_size)
    with local_run(config, rank, world_size) as run:
        pp_rank = run.runtime.state.pp.rank
    dims = ParallelDims.from_config(config.parallel, world_size)
    plan = states_of_rank(config.model, config.parallel, config.optimizer, config.ddp, dims, pp_rank)
    planned = [str(meta) for meta in plan.metas], plan.parameters, plan.memory.parameters, plan.memory.gradients
    built = (
        [str(param.meta) for param in run.ddp.params],  # type: ignore[attr-defined]
        sum(param.numel() for param in run.ddp.params),
        sum(buffer.param_data.nbytes for buffer in run.ddp.buffers),
        sum(buffer.grad_data.nbytes for buffer in run.ddp.buffers),
    )
    return planned, built


@pytest.mark.parametrize(
    "flags",
    [
        "--pp 2 --pipeline-schedule interleaved",
        "--pp 2 --pipeline-schedule zb-v",
        "--pp 2 --num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights",
    ],
)
def test_the_plan_of_a_rank_with_several_stages_is_what_is_built(flags: str) -> None:
    for planned, built in run_world(2, compare_stages, flags):
        assert planned == built
