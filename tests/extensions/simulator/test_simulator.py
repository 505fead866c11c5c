"""The pipeline simulator reproduces published bubble rates and detects action lists that deadlock."""

import pytest

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.passes import add_communication
from megatron.core.pipeline_parallel.schedules import B, F, build_schedule
from megatron.core.pipeline_parallel.walk import DeadlockError, Timed
from megatron.extensions.plan.simulator.simulator import StageCosts, held_at_peak, simulate

# Each row contains m, the times T_F, T_B, T_W and T_comm in ms, and the bubble rates. The values are those of the 1.5B
# model on 8 stages in tables 5 and 6 of arXiv 2401.10241.
PUBLISHED = [
    (24, 18.522, 18.086, 9.337, 0.601, {"1f1b": 0.2431, "zb-h1": 0.1585, "zb-h2": 0.1083}),
    (32, 18.513, 18.086, 9.331, 0.626, {"1f1b": 0.1985, "zb-h1": 0.1242, "zb-h2": 0.0837}),
    (64, 18.546, 18.097, 9.321, 0.762, {"1f1b": 0.1240, "zb-h1": 0.0674, "zb-h2": 0.0444}),
]


@pytest.mark.parametrize(("m", "forward", "input_grad", "weight_grad", "comm", "bubbles"), PUBLISHED)
def test_simulation_matches_published_bubble_rates(m, forward, input_grad, weight_grad, comm, bubbles):
    costs = StageCosts(forward, input_grad, weight_grad, comm)
    found = {schedule: simulate(build_schedule(schedule, 8, m), costs).bubble for schedule in bubbles}
    assert {schedule: round(bubble, 4) for schedule, bubble in found.items()} == bubbles


def test_times_of_two_stages():
    found = simulate(build_schedule("1f1b", 2, 1), StageCosts(forward=2, input_grad=3, weight_grad=1, comm=0.5))
    assert found.timeline[0] == [Timed(F(0, 0), 0, 2), Timed(B(0, 0), 9, 13)]
    assert found.timeline[1] == [Timed(F(1, 0), 2.5, 4.5), Timed(B(1, 0), 4.5, 8.5)]
    assert found.makespan == 13 and found.spans == [13, 6] and found.busy == [6, 6]
    assert found.bubble == pytest.approx(1 - 6 / 13)


def test_the_slowest_stage_sets_the_pace():
    found = simulate(build_schedule("1f1b", 3, 50), StageCosts(forward=(1, 2, 1), input_grad=(1, 2, 1)))
    assert found.makespan == pytest.approx(50 * 5, rel=0.05)


def test_activations_include_what_w_still_needs():
    lists = build_schedule("zb-h1", 2, 4)
    assert simulate(lists, StageCosts(activation=(10, 3))).peak_activations == [20, 6]
    assert simulate(lists, StageCosts(activation=(10, 3), kept_for_weight_grad=0)).peak_activations == [20, 3]
    assert simulate(lists, StageCosts(activation=(10, 3), kept_for_weight_grad=(1, 2))).peak_activations == [20, 12]
    assert simulate([[F(0, 0), F(0, 1)]]).peak_activations == [1]


def test_micro_batches_in_flight_at_the_peak():
    first, last = build_schedule("1f1b", 2, 4)
    assert held_at_peak(first, StageCosts()) == (2, {0: 2})
    assert held_at_peak(last, StageCosts(activation=7)) == (7, {1: 1})
    assert held_at_peak([F(0, 0), F(0, 1)], StageCosts()) == (1, {0: 1})


def test_alternating_passes_compute_while_the_other_exchanges():
    """The three parts of F take time 1 each, and the three parts of B take time 2 each. An all-to-all separates the
    parts of a pass. The parts alternate in the order F0 B0 F1 B1 F2 B2. A pass waits only if its all-to-all takes
    longer than the other pass."""
    pair = (F(1, 1), B(1, 0))
    times = {0.5: (9, 0), 1: (9, 0), 1.5: (10, 1), 3: (15, 6)}
    for exchange, (time, waited) in times.items():
        costs = StageCosts(3, 4, 2, exchanges=2, exchange=exchange)
        assert costs.duration(pair) == pytest.approx((time, waited)), exchange
        assert costs.duration(pair[:1]) == pytest.approx((3 + 2 * exchange, 2 * exchange))
    assert StageCosts(3, 4, 2).duration(pair) == (9, 0)


def test_lists_whose_passes_cannot_alternate_are_refused():
    both = Action(Kind.FB, 0, 1)
    for rest, message in (
        ([F(0, 1)], "but is followed by F"),
        ([B(0, 0), F(0, 1)], "must be followed by its F and by a B or I"),
        ([F(0, 2), B(0, 0)], "must be followed by its F and by a B or I"),
        ([F(0, 1), B(0, 1)], "belong to the same micro-batch, so they cannot run in turns"),
    ):
        with pytest.raises(ValueError, match=message):
            simulate([[F(0, 0), both, *rest]])


def test_a_cycle_between_ranks_is_named():
    lists = [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), F(1, 1), B(1, 0), B(1, 1)]]
    with pytest.raises(DeadlockError) as caught:
        simulate(lists)
    assert str(caught.value) == (
        "deadlock: rank 0 waits at B(stage 0, microbatch 0) for B(stage 1, microbatch 0) of rank 1; "
        "rank 1 waits at F(stage 1, microbatch 1) for F(stage 0, microbatch 1) of rank 0"
    )
    assert caught.value.cycle == [(0, B(0, 0), B(1, 0)), (1, F(1, 1), F(0, 1))]


def test_only_the_ranks_in_the_cycle_are_named():
    lists = [[F(0, 0), B(0, 0)], [F(1, 0), B(1, 0)], [B(2, 0), F(2, 0)]]
    with pytest.raises(DeadlockError) as caught:
        simulate(lists)
    assert caught.value.cycle == [(2, B(2, 0), F(2, 0))]


def test_a_missing_action_is_named():
    with pytest.raises(DeadlockError, match=r"rank 1 waits at F\(stage 1, .* for F\(stage 0, .* which is in no list"):
        simulate([[F(0, 1)], [F(1, 0)]])


def test_crossed_sends_block_only_with_rendezvous():
    lists = add_communication(build_schedule("1f1b", 2, 2))
    simulate(lists, rendezvous=True)
    first = lists[0]
    at = first.index(Action(Kind.SEND_F, 0, 1))
    other = first.index(Action(Kind.RECV_B, 0, 0))
    first[at], first[other] = first[other], first[at]
    simulate(lists)
    with pytest.raises(DeadlockError) as caught:
        simulate(lists, rendezvous=True)
    assert {rank for rank, _, _ in caught.value.cycle} == {0, 1}


def test_an_action_listed_twice_is_refused() -> None:
    lists = [list(actions) for actions in build_schedule("1f1b", 2, 2)]
    lists[1].append(lists[1][0])
    with pytest.raises(ValueError, match="is listed on rank 1 and again on rank 1"):
        simulate(lists)
