"""Functions that add sends and receives to lists of compute actions, and that validate the resulting lists."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache, partial

from megatron.core.pipeline_parallel.actions import (
    BACKWARDS,
    COMPUTE,
    OTHER_END,
    Action,
    Kind,
    Lists,
    counterpart,
    owners_of,
    units,
)
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.schedules import (
    PIPELINE_SCHEDULES,
    Schedule,
    build_schedule,
    forward_only,
    layout_of,
)
from megatron.core.pipeline_parallel.walk import Walk


def add_communication(lists: Lists, validates: bool = False) -> Schedule:
    """Add the actions SEND_F, RECV_F, SEND_B and RECV_B to lists of compute actions. No messages are needed between
    stages on the same rank.

    The function visits the actions of all ranks in the order of their start times in a simulation (`Walk`). Each send
    is appended to the sender's list, directly after the action that computes the message. At the same time, the
    matching receive is appended to the receiver's list. The receiver therefore posts the receive while the sender still
    computes the message, and then continues with its next actions.

    The resulting lists cannot deadlock, even if each send blocks until the receiver reaches the matching receive, and
    vice versa. The reason is that all lists follow one global order of actions, in which every action follows the
    actions that it depends on, and every send directly precedes its receive. Therefore the first unfinished action of
    the global order can always run. Two interleaved passes are adjacent in the global order, and the messages of both
    passes follow them.

    If `validates` is True, a VALIDATE is inserted into every list, directly before the first backward pass in the
    global order. At a VALIDATE, a rank learns whether the update of the previous step was kept (see `Kind`). No message
    is sent before a VALIDATE and received after it, so all ranks can restart their lists at the VALIDATE. A VALIDATE
    waits until all ranks have finished the previous step. This wait cannot cause a deadlock, because the waiting rank
    has already run all its actions of the previous step.
    """
    owner = owners_of(lists)
    placed: Schedule = [[] for _ in lists]
    for rank, unit in _by_start(lists):
        if validates and any(action.kind in BACKWARDS for action in unit):
            for own, actions in zip(placed, lists, strict=True):
                own.append(Action(Kind.VALIDATE, min(action.stage for action in actions), 0))
            validates = False
        placed[rank] += unit
        for send in filter(None, map(_message_of, unit)):
            receive = counterpart(send)
            peer = owner.get(receive.stage, rank)
            if peer != rank:
                placed[rank].append(send)
                placed[peer].append(receive)
    return placed


Unit = tuple[Action, ...]
"""Unit of actions, that is, either a single action, or an FB action with the two passes that it interleaves."""


def _by_start(lists: Lists) -> list[tuple[int, Unit]]:
    """Return a pair (rank, unit) for every unit of all lists, sorted by start time."""
    run = Walk(lists)
    run.run()
    found = []
    for rank, actions in enumerate(lists):
        starts = {action: start for action, start, _ in run.timeline[rank]}
        found += [(starts[unit[0]], rank, unit) for unit in units(actions)]
    return [(rank, unit) for _, rank, unit in sorted(found, key=_walk_order)]


def _walk_order(entry: tuple[float, int, Unit]) -> tuple[float, bool, int]:
    """Return the sort key of an entry (start, rank, unit), which sorts entries by start time.

    Among units that start at the same time, forward passes come first, in ascending order of stages. Backward passes
    follow, in descending order of stages. In this order, the sender of a message is visited before its receiver, so the
    receive is posted before a unit of the receiver that starts at the same time.
    """
    start, _, unit = entry
    kind, stage, _ = unit[0]
    return (start, False, stage) if kind in (Kind.F, Kind.FB) else (start, True, -stage)


def _message_of(action: Action) -> Action | None:
    """Return the send action that must follow a compute action, or None if the result of the compute action is not
    sent."""
    kind, stage, microbatch = action
    if kind is Kind.F:
        return Action(Kind.SEND_F, stage, microbatch)
    return Action(Kind.SEND_B, stage, microbatch) if kind in (Kind.B, Kind.I) and stage else None


def validate_schedule(lists: Lists, layout: PipelineLayout, microbatches: int, *, forward_only: bool = False) -> None:
    """Raise ValueError if the lists do not form a complete step.

    For each stage and micro-batch, the list of the stage's rank must contain one F, and either one B, or one I and one
    W. Every send must have a matching receive, and every receive a matching send. The ranks must be able to run their
    lists in order without a deadlock.
    """
    if len(lists) != layout.pp:
        raise ValueError(f"{len(lists)} lists for {layout.pp} pipeline ranks")
    for rank, actions in enumerate(lists):
        for action in actions:
            if layout.rank_of(action.stage) != rank:
                raise ValueError(f"rank {rank} runs {action} of rank {layout.rank_of(action.stage)}")
    counts = Counter(action for actions in lists for action in actions)
    repeated = [action for action, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(f"{repeated[0]} runs {counts[repeated[0]]} times")
    _check_complete(set(counts), layout.num_stages, microbatches, forward_only)
    one_sided = [action for action in counts if action.kind in OTHER_END and counterpart(action) not in counts]
    if one_sided:
        raise ValueError(f"{one_sided[0]} has no {counterpart(one_sided[0])}")
    Walk(lists).run()


def _check_complete(actions: set[Action], num_stages: int, microbatches: int, forward_only: bool) -> None:
    """Raise ValueError if a stage does not run all passes of a micro-batch. The passes are either F and B, or F, I and
    W. If `forward_only` is True, the only pass is F."""
    forward = {Kind.F}
    whole = {Kind.F, Kind.B}
    halves = {Kind.F, Kind.I, Kind.W}
    legal = (forward,) if forward_only else (whole, halves)
    kinds: dict[tuple[int, int], set[Kind]] = {(s, i): set() for s in range(num_stages) for i in range(microbatches)}
    for kind, stage, microbatch in actions:
        if (stage, microbatch) not in kinds:
            action = Action(kind, stage, microbatch)
            raise ValueError(f"{action} is outside {num_stages} stages and {microbatches} microbatches")
        if kind in COMPUTE:
            kinds[stage, microbatch].add(kind)
    for (stage, microbatch), found in kinds.items():
        if found not in legal:
            names, *wanted = ("+".join(kind.value for kind in Kind if kind in kinds) for kinds in (found, *legal))
            instead = f"{names or 'nothing'} instead of {' or '.join(wanted)}"
            raise ValueError(f"stage {stage}, microbatch {microbatch} runs {instead}")


@lru_cache(maxsize=64)
def pipeline_lists(
    schedule: str,
    p: int,
    m: int,
    v: int | None = None,
    evaluate: bool = False,
    group: int | None = None,
    in_turns: bool = False,
    validates: bool = False,
) -> tuple[tuple[Action, ...], ...]:
    """Return the validated action lists of a schedule, including sends and receives. `pipeline_lists(...)[rank]` is the
    list of a pipeline rank.

    Args:
        schedule: Registered name of the schedule.
        p: Number of pipeline ranks.
        m: Number of micro-batches.
        v: Number of stages per rank. None means the schedule's default.
        evaluate: Whether to return lists that contain only forward passes. The stages are placed as in training.
        group: Number of micro-batches per group. None means the schedule's default.
        in_turns: Whether forward and backward passes are interleaved.
        validates: Whether to add a VALIDATE to every list. At a VALIDATE, a rank learns whether the update of the
            previous step was kept (see `Kind`).

    Raises:
        ValueError: The schedule does not support `v`.
    """
    layout = layout_of(schedule, p, v)
    try:
        whole = partial(build_schedule, schedule, p, m, layout.chunks, group, in_turns)
        compute = forward_only(layout, m) if evaluate else whole()
        validate_schedule(compute, layout, m, forward_only=evaluate)
    except Exception as error:
        # The message already names a flag, for example because the schedule does not support v or group.
        if str(error).startswith("--"):
            raise
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--pipeline-schedule {schedule}: with {m} micro-batches on {p} ranks {what}; correct the schedule, "
            f"registered at {PIPELINE_SCHEDULES.where(schedule)}"
        ) from error
    lists = add_communication(compute, validates)
    validate_schedule(lists, layout, m, forward_only=evaluate)
    return tuple(map(tuple, lists))
