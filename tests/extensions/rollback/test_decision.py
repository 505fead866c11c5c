"""Tests of the decision that a run makes after a loss spike. The decision depends on the flags of the run."""

from __future__ import annotations

import random

from megatron.extensions.operate.rollback.decision import Decision, decide


def test_chooses_the_state_and_the_batches_to_skip_for_a_spike() -> None:
    assert decide(14, 2, None, interval=1) == Decision(14, 12, 13, 14)
    assert decide(14, 1, None, interval=1) == Decision(14, 13, 14, 14)
    assert decide(14, 10, None, interval=9) == Decision(14, 0, 1, 14)
    assert decide(100, 10, None, interval=9) == Decision(100, 90, 91, 100)
    assert decide(100, 10, 3, interval=9) == Decision(100, 90, 98, 100), "earlier batches are repeated"
    assert decide(100, 10, 30, interval=9) == Decision(100, 90, 91, 120), (
        "additional batches are skipped after the spike"
    )
    assert decide(16, 5, None, interval=1, last_to=12) == Decision(16, 12, 13, 16), "not before an earlier rollback"


def test_two_states_suffice_to_skip_a_spike() -> None:
    draw = random.Random(1)
    for _ in range(2000):
        steps, spike = draw.randrange(1, 40), draw.randrange(1, 400)
        interval, batches = max(1, steps - 1), draw.choice([None, draw.randrange(1, 60)])
        found = decide(spike, steps, batches, interval)
        held = [at for at in range(spike) if at % interval == 0][-2:]
        assert found.to in held, "before the state of the spike's step is stored, the last two states are available"
        assert spike in found.passed_over and found.first > found.to
        assert found.to == 0 or steps <= spike - found.to < 2 * steps - 1 or steps == 1
        assert len(found.passed_over) == (spike - found.to if batches is None else batches)
