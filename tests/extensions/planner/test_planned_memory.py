"""The planned bytes of states are those of the tensors that a run allocates, on every rank."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.distributed.param_layout import plan_buffers
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parts import update_ahead
from megatron.extensions.planner.memory import buffer_bytes, states_of_rank
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.dist.toy import optimizer_config
from tests.extensions import installed, needs
from tests.harness import local_run, run_world
from tests.pure import test_param_layout as layouts
from tests.tiny import TINY

# Several buckets, so that their padding counts.
COMMON = f"{TINY} --num-layers 7 --train-iters 1 --ddp-bucket-size 500"
LLAMA = (
    "--normalization RMSNorm --swiglu --ffn-hidden-size 36 --position-embedding-type rope --disable-bias-linear "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
)
EXPERTS = (
    f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 18 --moe-layer-freq 2 --tp 2 --ep 2 --etp 1 --sequence-parallel "
    "--bf16 --data-parallel-sharding-strategy"
)
REPLICATED = "--no-use-distributed-optimizer"


def compare(rank: int, world_size: int, flags: str) -> tuple[Any, Any]:
    """(planned, allocated): parameters in order, their elements, bytes of parameters, gradients, main parameters and
    moments, and bytes in host memory."""
    config = resolve_legal(parse_args(shlex.split(f"{COMMON} {flags}")), world_size)
    with local_run(config, rank, world_size) as run:
        pp_rank, buffers, optimizer = run.runtime.state.pp.rank, run.ddp.buffers, run.optimizer
        parameters = {p.meta.name: p for stage in run.stages.values() for p in stage.parameters()}.values()
    shards = [shard for shard in optimizer.shards if not shard.on_host]
    allocated = (
        [str(parameter.meta) for parameter in parameters],
        sum(parameter.numel() for parameter in parameters),
        sum(buffer.param_data.nbytes for buffer in buffers)
        + sum(parameter.nbytes for parameter in parameters if not parameter.requires_grad),
        sum(buffer.grad_data.nbytes for buffer in buffers),
        sum(shard.nbytes[0] for shard in shards),
        sum(shard.nbytes[1] for shard in shards),
        optimizer.nbytes[1],
    )
    dims = ParallelDims.from_config(config.parallel, world_size)
    plan = states_of_rank(config, dims, pp_rank)
    memory = plan.memory
    of_device = memory.parameters, memory.gradients, memory.main_parameters, memory.moments
    assert memory.total == sum(of_device) + memory.rollback and optimizer.nbytes[0] == memory.optimizer
    assert (memory.rollback > 0) == (update_ahead(config.optimizer) is not None)
    assert (memory.host > 0) == (config.optimizer.host_fraction > 0)
    return ([str(meta) for meta in plan.metas], plan.parameters, *of_device, memory.host), allocated


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (4, "--tp 2 --bf16"),
        (4, f"--tp 2 --fp64 {REPLICATED}"),
        (4, f"{LLAMA} --tp 2 --bf16 {REPLICATED}"),
        (4, f"{LLAMA} --tp 2 --fp32"),
        needs("unit_sharding", 4, f"{EXPERTS} optim_grads_params"),
        needs("unit_sharding", 4, f"{EXPERTS} optim_grads"),
        (4, "--pp 2 --bf16 --optimizer sgd"),
        (4, r"--pp 2 --bf16 --optimizer sgd --freeze layers\\.[01]\\. --freeze word_embeddings"),
        (2, "--pp 2 --bf16 --pipeline-schedule interleaved"),
        needs("zero_bubble", 2, "--pp 2 --bf16 --pipeline-schedule zb-v"),
        (2, "--pp 2 --bf16 --num-layers-per-virtual-pipeline-stage 1 --untie-embeddings-and-output-weights"),
        needs("pipedream_2bw", 4, "--pp 2 --bf16 --pipeline-schedule 2bw"),
        needs("pipedream_2bw", 2, "--pp 2 --fp64 --pipeline-schedule 2bw"),
        needs("post_validation", 4, "--pp 2 --bf16 --optimizer-post-validation"),
        needs("post_validation", 2, "--pp 2 --fp64 --optimizer sgd --optimizer-post-validation"),
    ],
)
def test_plan_equals_what_is_allocated(ranks: int, flags: str) -> None:
    for planned, allocated in run_world(ranks, compare, flags):
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
