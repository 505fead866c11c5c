"""From compute actions to what a rank runs: communication is placed and the result checked, all as pure lists."""

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
    """Places SEND_F/RECV_F and SEND_B/RECV_B; a stage whose neighbour is on the same rank needs none.

    All actions are walked in the order in which they would start. Whoever computes a message places both ends: the send
    behind the action in its own list, and the receive at the end of the peer's list as it stands. So a receive is
    posted when its message begins to be computed, ahead of what the peer does meanwhile, and each list is a subsequence
    of the one order of the walk. In that order every send directly precedes its receive, behind all that it depends on:
    running the first unfinished action of the walk is always possible, even if sends and receives block until both ends
    are there. Passes that run in turns are one step, before the messages of both.

    With `validates` every list has a VALIDATE where the walk reaches the first backward of all. No message passes from
    one side of this cut to the other, so that all ranks can begin their lists again there; and it waits for nothing but
    the step before, which every rank ends without help from this one."""
    owner = owners_of(lists)
    placed: Schedule = [[] for _ in lists]
    run = Walk(lists)
    run.run()
    starts = [{action: start for action, start, _ in timed} for timed in run.timeline]
    walk = [(starts[rank][unit[0]], rank, unit) for rank, actions in enumerate(lists) for unit in units(actions)]
    for _, rank, unit in sorted(walk, key=_walk_order):
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


def _walk_order(entry: tuple[float, int, tuple[Action, ...]]) -> tuple[float, bool, int]:
    """By start. Among actions that start together, the one whose message a neighbour needs next is first, so that the
    neighbour posts the receive before it computes: forwards by rising stage, then backwards by falling."""
    start, _, ((kind, stage, _), *_) = entry
    return (start, False, stage) if kind in (Kind.F, Kind.FB) else (start, True, -stage)


def _message_of(action: Action) -> Action | None:
    """The send that an action's result calls for."""
    kind, stage, microbatch = action
    if kind is Kind.F:
        return Action(Kind.SEND_F, stage, microbatch)
    return Action(Kind.SEND_B, stage, microbatch) if kind in (Kind.B, Kind.I) and stage else None


def validate_schedule(lists: Lists, layout: PipelineLayout, microbatches: int, *, forward_only: bool = False) -> None:
    """Raises ValueError unless the lists do a whole step: for every stage and microbatch one F, and either one B
    or one I and one W, on the rank of the stage, in an order that runs; each message with both its ends."""
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
    """The validated lists of a named schedule, communication included, for the executor: `pipeline_lists(...)[rank]`.

    With `evaluate` the forwards alone, on the same layout. Raises ValueError if the schedule does not take v.
    """
    layout = layout_of(schedule, p, v)
    try:
        whole = partial(build_schedule, schedule, p, m, layout.chunks, group, in_turns)
        compute = forward_only(layout, m) if evaluate else whole()
        validate_schedule(compute, layout, m, forward_only=evaluate)
    except Exception as error:
        if str(error).startswith("--"):  # v or the group, which it does not take
            raise
        what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"--pipeline-schedule {schedule}: with {m} micro-batches on {p} ranks {what}; correct the schedule, "
            f"registered at {PIPELINE_SCHEDULES.where(schedule)}"
        ) from error
    lists = add_communication(compute, validates)
    validate_schedule(lists, layout, m, forward_only=evaluate)
    return tuple(map(tuple, lists))
