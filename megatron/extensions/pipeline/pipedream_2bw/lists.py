"""Action lists for schedules in which a step begins before the previous step ends. The lists of one step are parts of
longer lists, which cover several consecutive steps."""

from __future__ import annotations

from functools import lru_cache

from megatron.core.pipeline_parallel.actions import BACKWARDS, SENDS, Action, Kind, Lists, counterpart
from megatron.core.pipeline_parallel.passes import add_communication, validate_schedule
from megatron.core.pipeline_parallel.schedules import Schedule, build_schedule, layout_of

RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
ENDS = BACKWARDS | {Kind.W, Kind.SEND_B}
"""Kinds of actions with which a rank may end its work on a micro-batch."""


@lru_cache(maxsize=64)
def lists_of_step(schedule: str, p: int, before: int, microbatches: int, after: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's action list for one step of a schedule without a pipeline flush between steps.

    A step overlaps with the previous and the next step. The micro-batches of these three steps are therefore scheduled
    as one long step. The actions of this step are then extracted from each rank's list. Each rank's list begins after
    the rank's last backward pass of the previous step, and ends with the rank's last backward pass of this step. The
    first micro-batch of this step has number 0, and the first micro-batch of the next step has number `microbatches`.
    The action VALIDATE precedes the first pass of the next step. VALIDATE performs the update of the previous step,
    because the next step uses the updated weights. At most 2 * `p` micro-batches of the previous step and of the next
    step are scheduled, because no other micro-batches of these steps overlap with this step.

    Args:
        schedule: Name of the schedule.
        p: Number of pipeline ranks.
        before: Number of micro-batches of the previous step; 0 if the pipeline is empty before this step.
        microbatches: Number of micro-batches of this step.
        after: Number of micro-batches of the next step; 0 if the pipeline is empty after this step."""
    before, after = min(before, 2 * p), min(after, 2 * p)
    end = before + microbatches
    compute = build_schedule(schedule, p, end + after)
    validate_schedule(compute, layout_of(schedule, p), end + after)
    until_end, _ = cut_behind(add_communication(compute), end)
    _, lists = cut_behind(until_end, before)
    numbered = ([a._replace(microbatch=a.microbatch - before) for a in actions] for actions in lists)
    return tuple(_with_validate(actions, microbatches) for actions in numbered)


def cut_behind(lists: Lists, microbatches: int) -> tuple[Schedule, Schedule]:
    """Divide action lists that include sends and receives into two parts. On each rank, the first part ends when the
    backward passes of the first `microbatches` micro-batches are complete. A receive is in the same part as its send,
    so that no message crosses from the first part to the second part. Actions in the second part may use tensors that
    were received in the first part."""
    heads: Schedule = []
    for actions in lists:
        ends = [i for i, a in enumerate(actions) if a.kind in ENDS and a.microbatch < microbatches]
        heads.append(list(actions[: ends[-1] + 1 if ends else 0]))
    sent = {counterpart(action) for head in heads for action in head if action.kind in SENDS}
    parts: tuple[Schedule, Schedule] = ([], [])
    for actions, head in zip(lists, heads, strict=True):
        in_first = [action in sent if action.kind in RECEIVES else i < len(head) for i, action in enumerate(actions)]
        for part, first in zip(parts, (True, False), strict=True):
            part.append([action for action, inside in zip(actions, in_first, strict=True) if inside is first])
    return parts


def _with_validate(actions: list[Action], microbatches: int) -> tuple[Action, ...]:
    """Insert the action VALIDATE, which performs the update of the previous step, before the first forward pass of the
    next step. Micro-batches belong to the next step if their number is `microbatches` or higher."""
    first = next((i for i, a in enumerate(actions) if a.kind is Kind.F and a.microbatch >= microbatches), None)
    if first is None:
        return tuple(actions)
    return (*actions[:first], Action(Kind.VALIDATE, actions[first].stage, 0), *actions[first:])
