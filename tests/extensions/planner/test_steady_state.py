"""Tests of a simulation of consecutive steps, each of which updates weights before the gradient norm is known. The
tests check the step time and the actions for which ranks wait."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.passes import pipeline_lists
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.extensions.plan.planner.time.pipeline import consecutive, post_validated
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate


@pytest.mark.parametrize(("schedule", "v"), [("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("zb-v", None)])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16)])
def test_late_validated_steps_take_the_longest_span(schedule, v, p, m):
    alone = simulate(build_schedule(schedule, p, m, v), StageCosts())
    time, bubble = post_validated(pipeline_lists(schedule, p, m, v, validates=True))
    assert time == max(alone.spans)
    assert bubble == pytest.approx(1 - sum(alone.busy) / (p * time))
    assert alone.makespan > time if schedule == "zb-v" else alone.makespan == time


def test_zb_h2_with_late_validation_has_no_bubble():
    assert post_validated(pipeline_lists("zb-h2", 8, 16, validates=True)) == (48.0, 0.0)
    assert simulate(pipeline_lists("zb-h2", 8, 16)).makespan == 55


def test_a_rank_waits_at_validation_for_the_end_of_the_previous_step():
    lists = pipeline_lists("zb-h2", 4, 8, validates=True)
    late = StageCosts(weight_grad=(1.0, 1.0, 1.0, 9.0))
    found = simulate(consecutive(lists, 2), late)
    end = max(entry.stop for timed in found.timeline for entry in timed if entry.action.microbatch < 8)
    for timed in found.timeline:
        verdict = [entry.action for entry in timed].index(Action(Kind.VALIDATE, timed[0].action.stage, 8))
        assert all(entry.start >= end for entry in timed[verdict:])
    assert any(entry.start < end for entry in found.timeline[0] if entry.action.microbatch >= 8)
