"""Test that, for many numbers of ranks, stages and micro-batches, every pipeline schedule is complete, does not
deadlock, and has the bubble that its paper states."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.pipeline_parallel.actions import COMPUTE, SENDS, Action, Kind, counterpart, units
from megatron.core.pipeline_parallel.layout import PipelineLayout
from megatron.core.pipeline_parallel.p2p import lane_of
from megatron.core.pipeline_parallel.passes import add_communication, pipeline_lists, validate_schedule
from megatron.core.pipeline_parallel.schedules import (
    PIPELINE_SCHEDULES,
    build_schedule,
    forward_only,
    gpipe,
    groups_of,
    layout_of,
    runs_in_turns,
    splits_backward,
)
from megatron.core.pipeline_parallel.walk import TIMED
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate

ONE_STAGE = ("gpipe", "1f1b")


ANY_V = {"interleaved": (1, 2, 3, 4)}


def assert_runs(compute, layout, m, forward_only=False):
    lists = add_communication(compute)
    validate_schedule(lists, layout, m, forward_only=forward_only)
    simulate(lists, rendezvous=True)
    assert [[a for a in actions if a.kind in TIMED] for actions in lists] == [list(actions) for actions in compute]
    sends = [a for actions in lists for a in actions if a.kind in SENDS]
    stages = layout.num_stages
    edges = sum(layout.rank_of(s) != layout.rank_of(s + 1) for s in range(stages - 1))
    assert len(sends) == edges * m * (1 if forward_only else 2)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_every_small_schedule_runs(schedule):
    for v in ANY_V.get(schedule, (None,)):
        for p in (1, 2, 3, 4, 5, 8):
            for m in {*range(1, 6), p + 1, 2 * p - 1, 2 * p}:
                assert_runs(build_schedule(schedule, p, m, v), layout_of(schedule, p, v), m)


IN_TURNS = (("interleaved", 2), ("interleaved", 3), *((("zb-h2", None),) if "zb-h2" in PIPELINE_SCHEDULES else ()))


@pytest.mark.parametrize(("schedule", "v"), [*IN_TURNS, ("1f1b", None), ("interleaved", 1)])
def test_every_small_schedule_runs_with_alternating_passes(schedule, v):
    for p in range(1, 7):
        if not runs_in_turns(schedule, p, v or 1):
            assert p > 1 and schedule in ("1f1b", "interleaved")
            continue
        for m in {*range(1, 8), 2 * p - 1, 2 * p}:
            compute = build_schedule(schedule, p, m, v, in_turns=True)
            assert_runs(compute, layout_of(schedule, p, v), m)
            for actions in compute:
                pairs = [unit for unit in units(actions) if len(unit) > 1]
                alone = [unit for unit in units(actions) if unit[0].kind is Kind.F]
                assert len(pairs) + len(alone) == m * (v or 1), "passes alternate in the steady state"
                ahead = [unit[0].kind for unit in units(actions)].index(Kind.FB) if pairs else len(alone)
                assert ahead == len(alone), "forward passes run alone only before the steady state"


@pytest.mark.parametrize(
    ("schedule", "v", "p"), [*((*each, p) for each in IN_TURNS for p in (1, 2, 4)), ("1f1b", None, 1)]
)
def test_alternating_passes_hide_all_to_alls_at_the_full_rate(schedule, v, p):
    """Additional micro-batches extend the step only by their computation time, because their all-to-alls overlap with
    computation."""

    def run(m, in_turns):
        costs = StageCosts(2, 2, 2, exchanges=4, exchange=0.3)
        return simulate(build_schedule(schedule, p, m, v, in_turns=in_turns), costs)

    first, second, apart = run(4 * p, True), run(8 * p, True), run(8 * p, False)
    assert second.makespan - first.makespan == pytest.approx(4 * p * (v or 1) * 6)
    assert apart.exposed == pytest.approx(apart.exchanging)
    assert 0 < second.exposed / second.exchanging < first.exposed / first.exchanging < 0.7
    # With interleaved passes, zb-h2 holds the activations of one more forward pass. The other schedules delay this
    # forward pass until a backward pass starts, so their peak does not change.
    if schedule != "zb-h2":
        assert second.peak_activations == apart.peak_activations
    else:
        assert all(
            mine == other + 1 for mine, other in zip(second.peak_activations, apart.peak_activations, strict=True)
        )


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 8), st.integers(1, 60), st.integers(2, 4), st.integers(0, 12))
def test_interleaved_runs_with_larger_groups(p, m, v, more):
    compute = build_schedule("interleaved", p, m, v, p + more)
    assert_runs(compute, PipelineLayout(p, v), m)
    if m % (p + more) == 0:
        assert simulate(compute, StageCosts(1, 1, 1)).makespan == 3 * (m * v + p - 1)


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4), st.booleans())
@settings(max_examples=50, deadline=None)
def test_evaluation_runs_on_any_layout(p, m, v, v_shaped):
    layout = PipelineLayout(p, v, v_shaped)
    assert_runs(forward_only(layout, m), layout, m, forward_only=True)


@given(st.integers(1, 12), st.integers(1, 40), st.sampled_from(ONE_STAGE))
def test_bubble_of_gpipe_and_1f1b(p, m, schedule):
    found = simulate(build_schedule(schedule, p, m), StageCosts(2, 3, 1))
    assert found.makespan == (m + p - 1) * 6
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    held = [m] * p if schedule == "gpipe" else [min(m, p - rank) for rank in range(p)]
    assert found.peak_activations == held


@given(st.integers(2, 8), st.integers(1, 5), st.integers(0, 7), st.integers(2, 4))
@settings(max_examples=50, deadline=None)
def test_bubble_of_interleaved_is_smaller_by_the_stages_on_a_rank(p, rounds, more, v):
    m = p * rounds + more % p
    found = simulate(build_schedule("interleaved", p, m, v), StageCosts(1, 1, 1))
    assert found.makespan == 3 * (m * v + p - 1)
    # According to arXiv 2205.05198, the peak is 1 + (p - 1) / (p v) times the peak of 1F1B.
    if more % p == 0 and rounds > 1:
        assert found.peak_activations[0] == pytest.approx(p * v * (1 + (p - 1) / (p * v)))


def test_backward_passes_are_split_where_the_schedule_says_so():
    for schedule in PIPELINE_SCHEDULES:
        kinds = {action.kind for actions in build_schedule(schedule, 3, 4) for action in actions}
        assert kinds == ({Kind.F, Kind.I, Kind.W} if splits_backward(schedule) else {Kind.F, Kind.B})


def test_placing_messages_hardly_costs_time():
    """A receive that is posted too late would delay its message by more than the transfer time, which the test would
    detect."""
    costs = StageCosts(1.85, 1.8, 0.93, comm=0.2)
    for schedule in PIPELINE_SCHEDULES:
        for p, m in ((4, 8), (8, 24), (8, 13)):
            compute = build_schedule(schedule, p, m)
            ideal, real = simulate(compute, costs).makespan, simulate(add_communication(compute), costs).makespan
            assert ideal <= real <= 1.006 * ideal, (schedule, p, m)


def test_interleaved_order_is_megatrons_where_p_divides_m():
    actions = build_schedule("interleaved", 2, 4, 2)[0]
    forwards = [(a.stage, a.microbatch) for a in actions if a.kind is Kind.F]
    assert forwards == [(0, 0), (0, 1), (2, 0), (2, 1), (0, 2), (0, 3), (2, 2), (2, 3)]
    assert [a.kind.value for a in actions] == list("FFFFF") + list("BFBFBF") + list("BBBBB")


@given(st.integers(1, 20), st.none() | st.integers(0, 20), st.integers(1, 100))
def test_groups_have_the_requested_size_unless_the_rest_is_too_small(p, more, m):
    """By default, a group of micro-batches contains one micro-batch per pipeline rank."""
    group = p + (more or 0)
    groups = groups_of(m, p, None if more is None else group)
    sizes = [len(part) for part in groups]
    assert [i for part in groups for i in part] == list(range(m))
    if m >= group and (m % group == 0 or m % group >= p):
        assert sizes == [group] * (m // group) + [m % group] * (m % group > 0)
    else:
        assert m < group or group <= min(sizes) <= max(sizes) < group + p
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_larger_groups_leave_messages_more_time_and_hold_more():
    costs = StageCosts(1, 1, 1, comm=0.5)
    small, large = (simulate(pipeline_lists("interleaved", 4, 24, 2, group=group), costs) for group in (4, 6))
    assert large.makespan < small.makespan
    assert large.peak_activations[0] > small.peak_activations[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lists: lists[0].pop(), "stage 0, microbatch 1 runs F instead of F.B or F.I.W"),
        (lambda lists: lists[0].append(Action(Kind.B, 0, 1)), "runs 2 times"),
        (lambda lists: lists[0].append(Action(Kind.W, 0, 1)), "runs F.B.W instead"),
        (lambda lists: lists[0].append(Action(Kind.F, 1, 0)), "rank 0 runs .* of rank 1"),
        (lambda lists: lists[1].append(Action(Kind.F, 1, 9)), "outside 2 stages and 2 microbatches"),
        (lambda lists: lists[1].append(Action(Kind.SEND_B, 1, 0)), "has no RECV_B"),
        (lambda lists: lists.pop(), "1 lists for 2 pipeline ranks"),
        (lambda lists: lists[0].reverse(), "deadlock"),
    ],
)
def test_a_broken_list_is_refused(change, message):
    lists = build_schedule("1f1b", 2, 2)
    change(lists)
    with pytest.raises(ValueError, match=message):
        validate_schedule(lists, PipelineLayout(2), 2)


@pytest.mark.parametrize(("schedule", "v"), [("zigzag", 1), ("1f1b", 2), ("gpipe", 3), ("zb-v", 1), ("interleaved", 0)])
def test_an_unknown_schedule_names_the_flag(schedule, v):
    with pytest.raises(ValueError, match=f"--pipeline-schedule {schedule}"):
        build_schedule(schedule, 2, 2, v)


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_lists_are_cut_where_no_message_is_in_flight(schedule):
    for v in ANY_V.get(schedule, (None,)):
        for p, m in ((1, 3), (2, 1), (2, 5), (4, 4), (4, 9), (5, 11)):
            lists = pipeline_lists(schedule, p, m, v, validates=True)
            simulate(lists, rendezvous=True)
            cuts = [next(i for i, a in enumerate(actions) if a.kind is Kind.VALIDATE) for actions in lists]
            before = {a for actions, cut in zip(lists, cuts, strict=True) for a in actions[:cut]}
            assert all(a.kind in (Kind.F, Kind.SEND_F, Kind.RECV_F) for a in before)
            assert all(counterpart(a) in before for a in before if a.kind is not Kind.F)
            plain = pipeline_lists(schedule, p, m, v)
            assert [[a for a in actions if a.kind is not Kind.VALIDATE] for actions in lists] == [*map(list, plain)]


@pytest.mark.parametrize("schedule", PIPELINE_SCHEDULES)
def test_a_rank_only_sends_or_only_receives_on_a_lane(schedule):
    """There is one lane (process group) per combination of forward or backward messages and even or odd sending ranks.
    No send waits for a receive, even if the messages of each lane are executed in order, as with NCCL. Interleaved
    schedules on an odd number of ranks are skipped, because the numbers of the first and the last rank are both even,
    so that both ranks send on the lane between them."""
    for v in ANY_V.get(schedule, (None,)):
        for p in (2, 3, 4, 5):
            layout = layout_of(schedule, p, v)
            if p % 2 and layout.chunks > 1 and not layout.v_shaped:
                continue
            for rank, actions in enumerate(pipeline_lists(schedule, p, 2 * p, v)):
                directions: dict[int, set[bool]] = {}
                for action in actions:
                    if action.kind not in COMPUTE:
                        sends = action.kind in SENDS
                        sender = rank if sends else layout.rank_of(counterpart(action).stage)
                        lane = lane_of(action.kind in (Kind.SEND_B, Kind.RECV_B), sender)
                        directions.setdefault(lane, set()).add(sends)
                assert all(len(both) == 1 for both in directions.values()), f"rank {rank}"


def test_a_schedule_that_is_not_callable_is_refused_at_registration():
    def of_ranks(p):
        return [[] for _ in range(p)]

    def of_stages(p, m, v):
        return [[] for _ in range(p)]

    start = "--pipeline-schedule refused: "
    with pytest.raises(
        ValueError, match=start + re.escape("must accept (p, m), but accepts (p); correct its parameters")
    ):
        PIPELINE_SCHEDULES.register("refused", of_ranks)
    said = "must accept (p, m, v, group), but accepts (p, m, v); correct its parameters"
    with pytest.raises(ValueError, match=start + "with_chunks " + re.escape(said)):
        PIPELINE_SCHEDULES.register("refused", gpipe, with_chunks=of_stages)
    assert "refused" not in PIPELINE_SCHEDULES
