"""Tests that compare the predicted goodput on failing devices with the goodput of a simulated run. The tests also cover
the options that request the prediction."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from megatron.extensions.plan.planner.failures.expected import (
    Expected,
    SaveCost,
    measured_save,
    save_cost,
    spares_worth,
)
from tests.forked import run_program

CASES = [
    pytest.param(Expected(5, 10_800, 120, SaveCost(2, 60, "")), 50, id="rare"),
    pytest.param(Expected(5, 3_600, 300, SaveCost(2, 100, "")), 30, id="long saves"),
    pytest.param(Expected(5, 1_200, 120, SaveCost(60, 60, "")), 20, id="blocking saves"),
]


def simulated(run: Expected, steps: int, segments: int = 3000) -> dict[str, float]:
    """Simulate `segments` segments of a run with randomly drawn failures. Return the fraction of the run's time that
    each activity takes, keyed by activity."""
    rng, trained = random.Random(1), steps * run.step_seconds
    now = repeated = restarts = saves = 0.0
    failure = rng.expovariate(1 / run.between_failures)
    loadable = position = 0
    pending: tuple[float, int] | None = None
    lag = run.save.seconds - run.save.blocking
    while position < segments:
        end = now + trained + run.save.blocking
        if pending and pending[0] <= min(end, failure):
            loadable, pending = pending[1], None
        if failure >= end:
            now, position, saves = end, position + 1, saves + run.save.blocking
            pending = now + lag, position
            continue
        repeated += failure - now + (position - loadable) * trained
        now, pending, position = failure, None, loadable
        while True:
            failure = now + rng.expovariate(1 / run.between_failures)
            ready = min(failure, now + run.restart_seconds)
            restarts, now = restarts + ready - now, ready
            if ready < failure:
                break
    useful = segments * trained
    return {"goodput": useful / now, "restarts": restarts / now}


@pytest.mark.parametrize(("run", "steps"), CASES)
def test_shares_match_a_simulated_run(run: Expected, steps: int) -> None:
    found, drawn = run.shares(steps), simulated(run, steps)
    assert found.goodput == pytest.approx(drawn["goodput"], abs=0.015)
    assert found.restarts == pytest.approx(drawn["restarts"], abs=0.015)
    assert found.goodput + found.saves + found.restarts + found.repeated == pytest.approx(1)


@pytest.mark.parametrize(("run", "steps"), CASES)
def test_no_interval_is_better_than_the_best(run: Expected, steps: int) -> None:
    best = run.best()
    assert best.goodput == max(run.shares(each).goodput for each in range(1, 20 * best.steps))


def test_the_best_interval_is_near_youngs_formula() -> None:
    """For short saves and rare failures, the best interval is sqrt(2 delta M) according to Young (1974), where delta is
    the duration of a save and M is the mean time between failures."""
    best = Expected(1.0, 1e6, 60, SaveCost(5, 5, "")).best()
    assert best.steps == pytest.approx(math.sqrt(2 * 5 * 1e6), rel=0.01)


def test_a_run_that_never_ends_a_segment_has_no_goodput() -> None:
    assert Expected(3600.0, 1.0, 60, SaveCost(1, 1, "")).best().goodput == 0.0


def test_a_background_save_stops_the_run_only_for_the_copy_to_the_host() -> None:
    cost = save_cost(10**10, 8 * 10**10, 50.0, background=True, known=None)
    assert (cost.blocking, cost.seconds) == (0.2, 40.0)
    assert save_cost(10**10, 8 * 10**10, 50.0, background=False, known=7.0) == SaveCost(7.0, 7.0, "")


def test_spare_nodes_pay_if_nodes_are_missing_often() -> None:
    none, present, alone = spares_worth(4, 1e-12, 3600)
    assert none == 0
    assert present == alone == pytest.approx(1)
    some, present, alone = spares_worth(1000, 1e-6, 4 * 3600)  # on average, 14.4 of the 1,000 nodes are being repaired
    assert 14 < some < 40
    assert alone < 1e-5 < 0.9 < present


def test_the_plan_measures_the_earlier_saves_of_a_run() -> None:
    saves: list[dict[str, object]] = [{"event": "save", "seconds": each} for each in (9.0, 3.0, 4.0)]
    others: list[dict[str, object]] = [{"event": "save", "seconds": 99.0, "error": "disk full"}, {"event": "start"}]
    assert measured_save([*saves, *others]) == 4.0
    assert measured_save(others) is None


FLAGS = (
    "--dry-run --world-size 16 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--vocab-size 256 --mock-data --micro-batch-size 1 --global-batch-size 16 --lr 1e-3 --train-iters 10"
).split()


def test_a_plan_states_the_cost_of_failures(tmp_path: Path) -> None:
    save = tmp_path / "run"
    save.mkdir()
    (save / "run_events.jsonl").write_text('{"event": "save", "iteration": 2, "seconds": 12.0}\n')
    asked = "--device h100 --failures-per-gpu-day 0.5 --restart-seconds 60 --save-interval 5 --json".split()
    done = run_program("pretrain_gpt.py", *FLAGS, *asked, str(tmp_path / "plan.json"), "--save", str(save))
    shown = done.stdout[done.stdout.index("Failures") :]
    assert "a failure every 3 h, 60 s until the next step" in shown
    assert "and can be loaded after 12 s\n" in shown
    record = json.loads((tmp_path / "plan.json").read_text())["failures"]
    assert record["seconds_between_failures"] == 10_800
    assert record["best"]["goodput"] >= record["given"]["goodput"] > 0
    assert record["given"]["steps"] == 5
    assert f"best --save-interval {record['best']['steps']:,}" in shown


def test_all_wrong_options_are_refused_at_once() -> None:
    done = run_program("pretrain_gpt.py", *FLAGS, "--failures-per-gpu-day", "-1", "--save-seconds", "x", code=2)
    assert "--failures-per-gpu-day -1: needs the predicted step time of a single layout; add --device" in done.stderr
    assert "--failures-per-gpu-day -1: must be a number above 0" in done.stderr
    assert (
        "--save-seconds x: must be a number above 0; pass the duration of a save in seconds, such as 30" in done.stderr
    )
    done = run_program("pretrain_gpt.py", *FLAGS, "--repair-hours", "2", code=2)
    assert "--repair-hours 2: has no effect without a failure rate; add --failures-per-gpu-day" in done.stderr
