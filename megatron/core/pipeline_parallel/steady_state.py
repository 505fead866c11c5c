"""Time of a step in a run of many steps, where no rank waits for the others between two of them. No torch."""

from __future__ import annotations

from megatron.core.pipeline_parallel.actions import Lists
from megatron.core.pipeline_parallel.schedules import Schedule
from megatron.core.pipeline_parallel.simulator import TIMED, Simulation, StageCosts, simulate

STEPS = 4
"""Steps that are simulated one after the other. Of the last two the differences of their ends count."""


def consecutive(lists: Lists, steps: int) -> Schedule:
    """The lists of several steps behind one another, micro-batches numbered on."""
    m = 1 + max(action.microbatch for actions in lists for action in actions)
    return [
        [action._replace(microbatch=action.microbatch + step * m) for step in range(steps) for action in actions]
        for actions in lists
    ]


def post_validated(lists: Lists, costs: StageCosts | None = None, tied: bool = False) -> tuple[float, float]:
    """(time of a step, idle share of it) in a steady run with --optimizer-post-validation.

    `lists` are of one step, with VALIDATE; there each rank waits for the end of the step before on all ranks. Without
    VALIDATE no rank waits. arXiv 2401.10241, section 4, and section 5.2 for the bubble.

    With `tied` weights on the first and on the last rank, the sum of their gradients makes these two end a step
    together, and all others wait for the first one's forward passes: steps do not overlap.
    """
    if tied:
        alone = simulate(lists, costs)
        return alone.makespan, alone.bubble
    found = simulate(consecutive(lists, STEPS), costs)
    m = 1 + max(action.microbatch for actions in lists for action in actions)
    ends = [_end(found, step * m) for step in (STEPS - 1, STEPS)]
    time = ends[1] - ends[0]
    return time, 1 - sum(found.busy) / STEPS / len(lists) / time


def _end(found: Simulation, microbatches: int) -> float:
    """When all ranks have done what is below a number of micro-batches."""
    timed = (entry for timeline in found.timeline for entry in timeline if entry.action.kind in TIMED)
    return max(entry.stop for entry in timed if entry.action.microbatch < microbatches)
