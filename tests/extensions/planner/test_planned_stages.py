"""The plan of a pipeline rank with several stages is what is built: parameters, and bytes to the last."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.planner.memory import states_of_rank
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.harness import local_run, run_world

COMMON = (
    "--num-layers 7 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 --lr 1e-2 --mock-data "
    "--global-batch-size 4 --train-iters 1 --eval-iters 0 --num-workers 0 --bf16 --cpu --ddp-bucket-size 500"
)


def compare(rank: int, world_size: int, flags: str) -> tuple[Any, Any]:
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
def test_the_plan_is_what_is_built(flags: str) -> None:
    for planned, built in run_world(2, compare, flags):
        assert planned == built
