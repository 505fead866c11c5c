"""Test that a resumed run continues the wall-time accounting of its earlier starts."""

from __future__ import annotations

import pytest

from megatron.extensions.observe.goodput import accounts
from megatron.extensions.observe.goodput.accounts import PARTS, earlier_starts
from megatron.training.reliability.run_status import parse_events

BEGAN = 1000.0


def event(iteration: int, began: float = BEGAN, **seconds: float) -> dict[str, object]:
    return {"event": "goodput", "iteration": iteration, "began": began, "seconds": accounts.none() | seconds}


SAVED = {"event": "save", "time": BEGAN + 50, "iteration": 4, "seconds": 1.0}


def test_a_first_start_inherits_no_time() -> None:
    earlier = earlier_starts([], 0, 77.0)
    assert earlier.began == 77.0 and earlier.seconds == accounts.none()
    assert accounts.goodput(earlier.seconds) == 0.0


def test_steps_after_the_checkpoint_are_repeated() -> None:
    events = [event(4, useful=40, skipped=5, startup=10), SAVED, event(7, useful=70, skipped=6, startup=10)]
    earlier = earlier_starts(events, 4, BEGAN + 100)
    assert earlier.began == BEGAN
    assert earlier.seconds == accounts.none() | {
        "useful": 40,
        "skipped": 5,
        "repeated": 31,
        "startup": 10,
        "idle": 100 - 86,
    }
    assert sum(earlier.seconds.values()) == 100  # each second belongs to exactly one category


def test_repeated_steps_stay_repeated_over_several_failures() -> None:
    events = [event(4, useful=40), SAVED, event(7, useful=70)]
    first = earlier_starts(events, 4, BEGAN + 70)
    again = first.seconds | {"useful": first.seconds["useful"] + 20}
    events += [event(4, **first.seconds), event(6, **again)]
    second = earlier_starts(events, 4, BEGAN + 95)
    assert (second.seconds["useful"], second.seconds["repeated"], second.seconds["idle"]) == (40, 50, 5)


def test_without_an_event_at_the_checkpoint_the_previous_event_counts() -> None:
    earlier = earlier_starts([event(3, useful=30), event(9, useful=90)], 5, BEGAN + 90)
    assert (earlier.seconds["useful"], earlier.seconds["repeated"]) == (30, 60)


def test_a_start_at_0_continues_only_a_run_without_saves() -> None:
    killed = [event(3, useful=30)]
    assert earlier_starts(killed, 0, BEGAN + 40).seconds == accounts.none() | {"repeated": 30, "idle": 10}
    failed = [*killed, SAVED | {"error": "the disk is full"}]
    assert earlier_starts(failed, 0, BEGAN + 40).began == BEGAN
    assert earlier_starts([*killed, SAVED], 0, BEGAN + 400).began == BEGAN + 400


def test_events_of_an_earlier_run_do_not_count() -> None:
    events = [event(6, useful=600), SAVED, event(2, began=BEGAN + 1000, useful=20), event(7, BEGAN + 1000, useful=70)]
    earlier = earlier_starts(events, 6, BEGAN + 1070)
    assert (earlier.seconds["useful"], earlier.seconds["repeated"]) == (20, 50)


def test_damaged_events_are_skipped() -> None:
    text = '{"event": "goodput"}\nno json\n[1]\n{"event": "goodput", "iteration": 1, "began": "x", "seconds": {}}\n{"ev'
    assert accounts.last_account(parse_events(text)) is None
    assert earlier_starts(parse_events(text), 3, 5.0).began == 5.0


def test_events_of_older_runs_have_no_rollbacks() -> None:
    old = event(4, useful=40)
    old["seconds"] = {part: 1.0 for part in PARTS if part != "rolled_back"}
    earlier = earlier_starts([old], 4, BEGAN + 8)
    assert earlier.began == BEGAN and earlier.seconds["rolled_back"] == 0


def test_a_clock_set_back_subtracts_no_time() -> None:
    assert earlier_starts([event(4, useful=40)], 4, BEGAN + 10).seconds == accounts.none() | {"useful": 40}


def test_the_line_names_the_largest_losses() -> None:
    seconds = accounts.none() | {"useful": 90.0, "startup": 9.99, "idle": 0.01}
    record = accounts.values(seconds)
    assert record["goodput"] == pytest.approx(0.9) and len(record) == 1 + len(PARTS)
    assert accounts.line(record) == " goodput 90.0 % of 0:01:40 | start-up 10.0 %"
