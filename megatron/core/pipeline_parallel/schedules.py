"""Pipeline schedules as pure functions of integers.

Each returns, for every pipeline rank, the compute actions in the order in which it runs them; sends and receives
are added by `passes`. p is the number of pipeline ranks, m of microbatches, v of stages on a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.layout import PipelineLayout

Schedule = list[list[Action]]


def F(stage: int, microbatch: int) -> Action:
    return Action(Kind.F, stage, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action(Kind.B, stage, microbatch)


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965): the activations of m microbatches are held."""
    return [[F(rank, i) for i in range(m)] + [B(rank, i) for i in range(m)] for rank in range(p)]


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B (arXiv 2006.09503, flushed): rank r never holds more than p - r microbatches."""
    return [
        alternate([F(rank, i) for i in range(m)], [B(rank, i) for i in range(m)], ahead=p - rank - 1)
        for rank in range(p)
    ]


def interleaved(p: int, m: int, v: int) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): v stages on a rank cut the bubble by v.

    Microbatches pass through the stages of a rank in groups of about p (`groups_of`), so any m is legal.
    """
    if v == 1:
        return one_f_one_b(p, m)
    layout = PipelineLayout(p, v)
    groups = groups_of(m, p)
    lists = []
    for rank in range(p):
        stages = layout.stages_of(rank)
        forwards = [F(stage, i) for group in groups for stage in stages for i in group]
        backwards = [B(stage, i) for group in groups for stage in reversed(stages) for i in group]
        ahead = 2 * (p - rank - 1) + (v - 1) * len(groups[0])
        lists.append(alternate(forwards, backwards, ahead))
    return lists


def forward_only(layout: PipelineLayout, m: int) -> Schedule:
    """Forwards alone, for evaluation: with several stages on a rank in groups of about pp microbatches."""
    return [
        [F(stage, i) for group in groups_of(m, layout.pp) for stage in layout.stages_of(rank) for i in group]
        for rank in range(layout.pp)
    ]


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], ahead: int) -> list[Action]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return [*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[steady:]]


def groups_of(m: int, p: int) -> list[range]:
    """m microbatches in as many groups as there are whole p in m, as even as possible, the largest first."""
    count = max(1, m // p)
    size, larger = divmod(m, count)
    starts = [i * size + min(i, larger) for i in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


SCHEDULES = ("gpipe", "1f1b", "interleaved")


def layout_of(schedule: str, p: int, v: int = 1) -> PipelineLayout:
    """Where the stages of a schedule lie. Raises ValueError if the schedule does not take v stages on a rank."""
    if schedule not in SCHEDULES:
        raise ValueError(f"--pipeline-schedule {schedule} must be one of {', '.join(SCHEDULES)}")
    if v != 1 and schedule != "interleaved":
        raise ValueError(
            f"--pipeline-schedule {schedule} runs 1 stage on a rank, not {v}: "
            f"drop --num-virtual-stages-per-pipeline-rank, or use --pipeline-schedule interleaved"
        )
    return PipelineLayout(p, v)


def build_schedule(schedule: str, p: int, m: int, v: int = 1) -> Schedule:
    """The compute actions of a schedule by name."""
    layout_of(schedule, p, v)
    if schedule == "gpipe":
        return gpipe(p, m)
    return interleaved(p, m, v) if schedule == "interleaved" else one_f_one_b(p, m)
