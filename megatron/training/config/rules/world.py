"""Rules of the world size."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def world(c: RunConfig, world_size: int) -> Iterator[Problem]:
    p = c.parallel
    sizes = (p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size)
    if min(sizes) < 1:
        return
    model, shown = math.prod(sizes), "TP {} * PP {} * CP {}".format(*sizes)
    if world_size % model:
        launch = f"start {round(world_size / model) * model or model} ranks (torchrun --nproc-per-node, or srun)"
        remedy = f"{launch}, or lower the model-parallel sizes"
        yield Problem("world size", world_size, f"must be a multiple of {shown} = {model}", remedy)
        return
    replicas = world_size // model
    if p.data_parallel_size is not None and p.data_parallel_size != replicas:
        yield Problem(
            "--data-parallel-size",
            p.data_parallel_size,
            f"must be world size {world_size} / ({shown}) = {replicas}",
            f"remove it, or start {p.data_parallel_size * model} ranks",
        )
