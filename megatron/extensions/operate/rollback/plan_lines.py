"""Estimate of the host memory that rollbacks need, for a run's plan."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.operate.rollback.flags import interval_of
from megatron.extensions.plan.planner.flags import PlannedRun
from megatron.extensions.plan.planner.memory import states_of_rank
from megatron.training.config.batch_size import byte_text

STATES = 2
"""Number of states that a rank keeps for rollbacks."""


def lines(run: PlannedRun) -> Iterator[str]:
    """Yield an estimate of the host memory for the states that a rank keeps for rollbacks."""
    dims = ParallelDims.from_config(run.config.parallel, run.world_size)
    most = 0
    for pp_rank in range(dims.pp):
        held = states_of_rank(run.config, dims, pp_rank).memory
        most = max(most, held.parameters + held.main_parameters + held.moments + held.host_states)
    interval = interval_of(run.config)
    every = "every step" if interval == 1 else f"every {interval} steps"
    yield f"host memory of a rank for {STATES} states, one {every}, at most: {byte_text(STATES * most)}"
