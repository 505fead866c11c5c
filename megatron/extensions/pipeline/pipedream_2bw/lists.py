"""Lists of one step, cut from those of a run without an end: a step's passes begin while the one before it ends."""

from __future__ import annotations

from functools import lru_cache

from megatron.core.pipeline_parallel.actions import BACKWARDS, SENDS, Action, Kind, Lists, counterpart
from megatron.core.pipeline_parallel.passes import add_communication, validate_schedule
from megatron.core.pipeline_parallel.schedules import Schedule, build_schedule, layout_of

RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
ENDS = BACKWARDS | {Kind.W, Kind.SEND_B}
"""The actions that end the work of a rank on a micro-batch."""


@lru_cache(maxsize=64)
def lists_of_step(schedule: str, p: int, before: int, microbatches: int, after: int) -> tuple[tuple[Action, ...], ...]:
    """The lists of one step of a schedule that does not flush, for the executor.

    `before` and `after` are the micro-batches of the steps next to it, 0 where the pipeline is empty in between. The
    passes of all three are in the order of one long step, of which each rank has the part from its last backward of the
    step before to that of its own. Micro-batches are numbered from the first of this step on, so that those from
    `microbatches` on are of the next step; VALIDATE stands before the first of these, whose pass needs the update of
    the step before. Of the adjacent steps, only the passes that overlap with this one are built."""
    before, after = min(before, 2 * p), min(after, 2 * p)
    end = before + microbatches
    compute = build_schedule(schedule, p, end + after)
    validate_schedule(compute, layout_of(schedule, p), end + after)
    until_end, _ = cut_behind(add_communication(compute), end)
    _, lists = cut_behind(until_end, before)
    numbered = ([a._replace(microbatch=a.microbatch - before) for a in actions] for actions in lists)
    return tuple(_with_validate(actions, microbatches) for actions in numbered)


def cut_behind(lists: Lists, microbatches: int) -> tuple[Schedule, Schedule]:
    """Lists with communication in two parts: the first one ends, on each rank, with what brings the backward passes of
    the first `microbatches` to their end. A receive stands in the first part if its send does: no message passes from
    one part to the other, but what it brought may be read there."""
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
    """With VALIDATE before the first pass of micro-batches from this number on."""
    first = next((i for i, a in enumerate(actions) if a.kind is Kind.F and a.microbatch >= microbatches), None)
    if first is None:
        return tuple(actions)
    return (*actions[:first], Action(Kind.VALIDATE, actions[first].stage, 0), *actions[first:])
