"""The zero-bubble schedules have the bubbles and the memory that the zero-bubble paper states."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.schedules import build_schedule, layout_of
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate


@given(st.integers(1, 10), st.integers(0, 20), st.floats(0, 0.2), st.sampled_from([("zb-h1", 1), ("zb-h2", 2)]))
@settings(max_examples=60, deadline=None)
def test_bubble_of_zero_bubble_schedules(p, more, uneven, schedule_k):
    schedule, k = schedule_k
    m = 2 * p - 1 + more
    forward, input_grad, weight_grad = 1.0, 1.0 + uneven, 1.0 - uneven
    found = simulate(build_schedule(schedule, p, m), StageCosts(forward, input_grad, weight_grad))
    idle = (p - 1) * (forward + input_grad - k * weight_grad)
    assert max(found.spans) == pytest.approx(m * 3 + idle)
    assert found.busy == pytest.approx([m * 3] * p)
    assert found.peak_activations == [k * (p - 1) + 1] * p


@given(st.integers(1, 10), st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_zb_v_has_no_idle_ranks_and_the_memory_of_1f1b(p, more):
    m = 2 * p - 1 + more
    found = simulate(build_schedule("zb-v", p, m), StageCosts(1, 1, 1, activation=0.5))
    assert sum(found.busy) == p * max(found.spans)
    assert max(found.peak_activations) <= p


@pytest.mark.parametrize("p", [1, 4, 8, 16])
def test_a_step_lasts_as_long_as_its_slowest_rank(p):
    """No rank updates its weights before the gradients of all ranks are complete. Therefore, a zb-h2 step takes as long
    as a zb-h1 step. In a zb-v step, each rank is idle for half of the time that a rank is idle in a zb-h1 step."""
    m = 2 * p
    for schedule, time, late in (("zb-h1", 1.0, p - 1), ("zb-h2", 1.0, p - 1), ("zb-v", 0.5, (p - 1) / 2)):
        found = simulate(build_schedule(schedule, p, m), StageCosts(time, time, time))
        assert found.makespan == 3 * m + late
        assert found.bubble == pytest.approx(late / (3 * m + late))


def test_zb_h1_needs_no_more_memory_than_1f1b():
    for p in range(1, 9):
        for m in range(1, 17):
            peaks = [simulate(build_schedule(name, p, m)).peak_activations for name in ("zb-h1", "1f1b")]
            assert max(peaks[0]) <= max(peaks[1])


def test_zb_v_starts_and_ends_on_the_first_rank():
    layout = layout_of("zb-v", 4)
    assert layout.stages_of(0) == [0, 7] and layout.stages_of(3) == [3, 4]
