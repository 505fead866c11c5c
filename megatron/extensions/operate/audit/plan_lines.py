"""Estimate the time and memory that audits cost, as lines of a run's plan."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.operate.audit.flags import AuditFlags
from megatron.extensions.plan.planner.flags import PlannedRun
from megatron.extensions.plan.planner.memory import states_of_rank
from megatron.training.config.batch_size import byte_text
from megatron.training.config.run_config import RunConfig


def lines(run: PlannedRun) -> Iterator[str]:
    """Yield the lines of the plan section about audits. Each line contains an estimate of time or memory."""
    options = run.config.options(AuditFlags)
    interval = options.audit_interval
    every = f"every {interval} steps" if interval > 1 else "every step"
    if options.audit_by == "peer":
        seconds = "" if run.step_seconds is None else f", at most {run.step_seconds:.3g} s each"
        yield f"a second forward and backward pass {every}{seconds}: at most {1 / interval:.2%} of the step time"
        yield "a third pass and reduction only if ranks disagree"
        return
    weights = weight_bytes(run.config, run.world_size)
    yield f"{byte_text(weights)} of weights are written to --save {every}, while training waits"
    width = 8 if run.config.parallel.params_dtype in ("float32", "float64") else 4
    itemsize = {"float64": 8, "float32": 4}.get(run.config.parallel.params_dtype, 2)
    # The audit process holds two models, each with gradients, fp64 gradient sums and optimizer states.
    held = weights // itemsize * (itemsize + width + 2 * (8 + 3 * 4) + 3 * (width - 4))
    yield f"about {byte_text(held)} of memory on the first rank's host for the audit process, without activations"


def weight_bytes(config: RunConfig, world_size: int) -> int:
    """Return the size of all weights in bytes."""
    dims = ParallelDims.from_config(config.parallel, world_size)
    stages = (states_of_rank(config, dims, pp_rank).memory.parameters for pp_rank in range(dims.pp))
    return sum(stages) * dims.tp
