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
    """Adds messages to lists of compute actions: SEND_F and RECV_F, SEND_B and RECV_B. Stages on the same rank need
    none.

    The actions of all ranks are visited in the order in which they would start. For each message, the send is appended
    to the list of the rank that computes it, right after the action, and the receive to the list of its peer, as far as
    that list has come. The peer therefore posts the receive when the message begins to be computed, and then does its
    own work meanwhile.

    The lists cannot wait for each other forever, even if sends and receives block until both ends are there: each list
    is a part of one order, in which every send directly precedes its receive and follows all that it depends on. The
    first unfinished action of this order can always run. Two passes that run in turns are one step of it, and the
    messages of both follow them.

    With `validates`, every list has a VALIDATE where the order reaches the first backward of all. No message crosses
    this point, so all ranks can begin their lists again there. A VALIDATE waits only for the step before, which every
    rank ends without help from this one."""
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
"""One action, or the FB before two passes that run in turns with both of them."""


def _by_start(lists: Lists) -> list[tuple[int, Unit]]:
    """(rank, unit) of all units, in the order in which they would start."""
    run = Walk(lists)
    run.run()
    found = []
    for rank, actions in enumerate(lists):
        starts = {action: start for action, start, _ in run.timeline[rank]}
        found += [(starts[unit[0]], rank, unit) for unit in units(actions)]
    return [(rank, unit) for _, rank, unit in sorted(found, key=_walk_order)]


def _walk_order(entry: tuple[float, int, Unit]) -> tuple[float, bool, int]:
    """Key that sorts (start, rank, unit) by start. Of units that start together, forwards come first, by rising stage,
    then backwards, by falling stage: a neighbour needs the first one's message next, and so posts its receive before it
    computes."""
    start, _, unit = entry
    kind, stage, _ = unit[0]
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
    """Raises ValueError unless every stage runs each micro-batch: F with B, or F with I and W; F alone if there are no
    backwards."""
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
