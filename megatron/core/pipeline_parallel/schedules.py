"""Pipeline schedules as pure functions of integers, and their registry. This module does not import torch.

A schedule is a function that returns the compute actions of every pipeline rank, in execution order. The module
`passes` adds sends and receives. p is the number of pipeline ranks, m is the number of micro-batches, and v is the
number of stages per rank. To add a schedule:

    @PIPELINE_SCHEDULES.register("my_schedule")
    def my_schedule(p: int, m: int) -> Schedule: ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Protocol

from megatron.core.pipeline_parallel.actions import Action, Kind, Lists
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.registry import Registry, refused_call

Schedule = list[list[Action]]


class PipelineSchedule(Protocol):
    """Interface of pipeline schedules with a fixed number of stages per rank."""

    def __call__(self, p: int, m: int) -> Schedule:
        """Return the compute actions of each of p pipeline ranks for m micro-batches, in execution order."""


class ChunkedSchedule(Protocol):
    """Interface of pipeline schedules with v stages per rank."""

    def __call__(self, p: int, m: int, v: int, group: int | None) -> Schedule:
        """Return the compute actions of each pipeline rank. `group` is the number of micro-batches per group, or None
        for the default."""


class EndlessSchedule(Protocol):
    """Interface of schedules in which a step already starts passes of the next step."""

    def __call__(self, schedule: str, p: int, before: int, microbatches: int, after: int) -> Lists:
        """Return the action lists of one step, including sends and receives. `before` and `after` are the numbers of
        micro-batches in the previous and in the next step. If there is no previous or next step, the number is 0."""


@dataclass(frozen=True)
class ScheduleFacts:
    """Properties of a pipeline schedule, which are the keyword arguments of its registration. All properties have
    default values."""

    chunks: int = 1
    """Default number of stages per rank."""

    with_chunks: ChunkedSchedule | None = None
    """Variant of the schedule that supports any number of stages per rank. `with_chunks` is None if the schedule always
    has `chunks` stages per rank."""

    any_groups: bool = False
    """True if the function `with_chunks` uses its argument `group`."""

    v_shaped: bool = False
    """True if stages are placed in a V, so that rank 0 holds the first and the last stage."""

    splits_backward: bool = False
    """True if the schedule uses separate I (input gradient) and W (weight gradient) actions instead of B."""

    always_legal: bool = False
    """True if the schedule supports every number of ranks and micro-batches. Validation of the flags then need not
    build the action lists."""

    in_turns: ChunkedSchedule | None = None
    """Variant of the schedule in which forward and backward passes are interleaved. In its lists, an FB precedes each
    interleaved pair of an F and a B or I. `in_turns` is None if the schedule has no such variant."""

    of_step: EndlessSchedule | None = None
    """Function that returns the action lists of one step, for schedules in which a step already starts passes of the
    next step. `of_step` is None if each step ends before the next step starts."""

    asks_for: tuple[object, ...] = ()
    """Extension options that are added to `config.options` of every run with this schedule."""

    rules: Callable[..., Iterable[object]] | None = None
    """Function that checks whether a run may use this schedule. The function takes a `RunConfig` and the world size,
    and returns a `Problem` for each violated rule."""

    def __post_init__(self) -> None:
        for name, protocol, part in (
            ("with_chunks", ChunkedSchedule, self.with_chunks),
            ("in_turns", ChunkedSchedule, self.in_turns),
            ("of_step", EndlessSchedule, self.of_step),
        ):
            if part is not None and (refused := refused_call(protocol, part)):
                raise ValueError(f"{name} {refused}")

    @property
    def flushes(self) -> bool:
        """True if the schedule ends each step before it starts the next step."""
        return self.of_step is None


PIPELINE_SCHEDULES = Registry("--pipeline-schedule", ScheduleFacts, protocol=PipelineSchedule)
"""Registered pipeline schedules, keyed by name."""


def F(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action(Kind.B, stage, microbatch)


def gpipe(p: int, m: int) -> Schedule:
    """GPipe (arXiv:1811.06965). Each rank runs all forward passes, followed by all backward passes, and holds the
    activations of m micro-batches."""
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]


def one_f_one_b(p: int, m: int, in_turns: bool = False) -> Schedule:
    """1F1B with a flush at the end of each step (arXiv:2006.09503). Rank r holds the activations of at most p - r
    micro-batches. If `in_turns` is True, p must be 1, and each forward pass is interleaved with the backward pass of
    the previous micro-batch.
    """
    assert p == 1 or not in_turns, (
        "1F1B supports in_turns only for p = 1: otherwise, the two passes of a pair depend on each other"
    )
    lists = []
    for rank in range(p):
        forwards, backwards = [F(rank, i) for i in range(m)], [B(rank, i) for i in range(m)]
        ahead = p - rank - 1
        lists.append(alternate(forwards, backwards, ahead + in_turns, in_turns))
    return lists


def interleaved(p: int, m: int, v: int = 2, group: int | None = None, in_turns: bool = False) -> Schedule:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2). With v stages per rank, the pipeline bubble is v times shorter.

    A rank processes the micro-batches in groups of about p (`groups_of`): it runs one stage for all micro-batches of
    the group, and then the next stage. The number of micro-batches m may be any number. In groups of fewer than p
    micro-batches, ranks would be idle. If m is less than 2p, there is only one group, and a rank holds the activations
    of all m micro-batches.

    If `in_turns` is True, the forward and backward passes of the steady state are interleaved. In this case, each rank
    starts with one additional forward pass, so that the two passes of a pair do not depend on each other.

    Args:
        p: Number of pipeline ranks.
        m: Number of micro-batches.
        v: Number of stages per rank.
        group: Number of micro-batches per group. Larger groups leave more time for each message, but increase the
            number of activations on a rank.
        in_turns: Whether to interleave the two passes of each forward-backward pair, by inserting an FB before the
            pair.
    """
    if v == 1:
        return one_f_one_b(p, m, in_turns)
    layout = PipelineLayout(p, v)
    groups = groups_of(m, p, group)
    lists = []
    for rank in range(p):
        stages = layout.stages_of(rank)
        forwards = [F(stage, i) for group in groups for stage in stages for i in group]
        backwards = [B(stage, i) for group in groups for stage in reversed(stages) for i in group]
        ahead = 2 * (p - rank - 1) + (v - 1) * len(groups[0])
        lists.append(alternate(forwards, backwards, ahead + in_turns, in_turns))
    return lists


def of_one_stage(schedule: PipelineSchedule) -> ChunkedSchedule:
    """Convert a schedule for one stage per rank to a `ChunkedSchedule`, which ignores the arguments `v` and `group`."""
    return lambda p, m, v, group: schedule(p, m)


PIPELINE_SCHEDULES.register("gpipe", gpipe, always_legal=True)
PIPELINE_SCHEDULES.register(
    "1f1b", one_f_one_b, in_turns=of_one_stage(partial(one_f_one_b, in_turns=True)), always_legal=True
)
PIPELINE_SCHEDULES.register(
    "interleaved",
    interleaved,
    chunks=2,
    with_chunks=interleaved,
    any_groups=True,
    in_turns=partial(interleaved, in_turns=True),
    always_legal=True,
)


def forward_only(layout: PipelineLayout, m: int) -> Schedule:
    """Return lists that contain only forward passes, for evaluation. If a rank has several stages, it processes the
    micro-batches in groups of about p (`groups_of`)."""
    return [
        [F(stage, i) for group in groups_of(m, layout.pp) for stage in layout.stages_of(rank) for i in group]
        for rank in range(layout.pp)
    ]


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int, in_turns: bool = False
) -> list[Action]:
    """Return a list that starts with `ahead` forward passes, continues with forward-backward pairs, and ends with the
    remaining backward passes.

    If `in_turns` is True, an FB precedes each forward-backward pair, so that the two passes of the pair are
    interleaved.
    """
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    actions = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards[:steady], strict=True):
        if in_turns:
            actions.append(forward._replace(kind=Kind.FB))
        actions += [forward, backward]
    return [*actions, *backwards[steady:]]


def groups_of(m: int, p: int, group: int | None = None) -> list[range]:
    """Divide m micro-batches into groups of `group` micro-batches. The default group size is p.

    If m is not a multiple of the group size and at least p micro-batches remain, the remaining micro-batches form an
    additional group. If fewer than p micro-batches remain, they are distributed evenly over the other groups, and
    larger groups precede smaller groups.
    """
    group = group or p
    if m > group and m % group >= p:
        return [range(start, min(start + group, m)) for start in range(0, m, group)]
    count = max(1, m // group)
    size, larger = divmod(m, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def layout_of(schedule: str, p: int, v: int | None = None) -> PipelineLayout:
    """Return the placement of a schedule's stages on ranks. If `v` is None, each rank has the schedule's default number
    of stages.

    The function raises ValueError if the schedule is unknown or does not support v.
    """
    named = PIPELINE_SCHEDULES.facts(schedule)
    v = named.chunks if v is None else v
    if v < 1 or (v != named.chunks and named.with_chunks is None):
        rule = "at least 1" if named.with_chunks is not None else str(named.chunks)
        remedy = f"nearest: {named.chunks}" + (", or use --pipeline-schedule interleaved" if v > 1 else "")
        raise ValueError(
            f"--num-virtual-stages-per-pipeline-rank {v}: must be {rule} with --pipeline-schedule {schedule}; {remedy}"
        )
    return PipelineLayout(p, v, named.v_shaped)


def splits_backward(schedule: str) -> bool:
    """Return whether a schedule splits each backward pass (B) into I and W actions. These actions require a
    `WeightGradQueue`."""
    return PIPELINE_SCHEDULES.facts(schedule).splits_backward


def runs_in_turns(schedule: str, p: int, v: int) -> bool:
    """Return whether a schedule with v stages on each of p ranks can interleave a forward and a backward pass.

    Two passes can be interleaved only if neither pass depends on the other, either directly or through other ranks.
    """
    facts = PIPELINE_SCHEDULES.facts(schedule)
    return facts.in_turns is not None and (p == 1 or v > 1 or facts.splits_backward)


def build_schedule(
    schedule: str, p: int, m: int, v: int | None = None, group: int | None = None, in_turns: bool = False
) -> Schedule:
    """Return the compute actions of a registered schedule.

    Schedules that do not group micro-batches ignore `group`. The function raises ValueError if the schedule is unknown
    or does not support `v`.
    """
    v = layout_of(schedule, p, v).chunks
    facts = PIPELINE_SCHEDULES.facts(schedule)
    if in_turns:
        assert facts.in_turns is not None and runs_in_turns(schedule, p, v), (
            f"{schedule} has no variant in which passes run in turns"
        )
        return facts.in_turns(p, m, v, group)
    if facts.with_chunks is not None:
        return facts.with_chunks(p, m, v, group)
    return PIPELINE_SCHEDULES[schedule](p, m)
