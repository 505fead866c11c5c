"""Tests of scaling ladders. The tests check that fits recover known scaling laws and that the runs of a ladder resume.
Other tests compare a run with its prediction."""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron.extensions.plan.ladder import law as scaling_law
from megatron.extensions.plan.ladder.best_rate import BestRate, rate_of_target
from megatron.extensions.plan.ladder.expectation import read_expectation
from megatron.extensions.plan.ladder.law import Form, Point, drawn, fit, form_of, interval
from megatron.extensions.plan.ladder.outcome import Outcome, of_law, outcomes, table
from megatron.extensions.plan.ladder.prediction import lines, predict
from megatron.extensions.plan.ladder.rungs import Ladder, Wanted, build_ladder, counted_parameters
from megatron.extensions.plan.ladder.valid_loss import valid_loss
from megatron.training.config.arguments import parse_args
from megatron.training.config.prepare import load_config
from megatron.training.config.validation import findings, validate
from tests.forked import run_forked
from tests.tiny import TINY
from tools.ladder import main, swept_rates

MEASURED = Path(__file__).with_name("python_sources.json")
TARGET = f"{TINY} --hidden-size 64 --ffn-hidden-size 128 --seq-length 8 --eval-iters 1 --train-iters 400".split()


def loss_of(parameters: float, tokens: float) -> float:
    return 1.5 + 400 * parameters**-0.34 + 410 * tokens**-0.28


def grid() -> list[Point]:
    return [Point(n, d, loss_of(n, d)) for n, d in product((1e6, 4e6, 2e7), (2e7, 1e8, 6e8))]


def test_the_fit_recovers_a_law_of_parameters_and_tokens() -> None:
    found = fit(grid()).described()
    expected = {"E": 1.5, "A": 400, "a": 0.34, "B": 410, "b": 0.28}
    assert found == pytest.approx(expected, rel=1e-3)
    assert fit(grid())(Point(1e8, 2e9, 0)) == pytest.approx(loss_of(1e8, 2e9), rel=1e-6)


def test_runs_with_one_token_ratio_give_a_law_of_compute() -> None:
    points = [Point(n, 20 * n, 0.8 + 300 * (120 * n * n) ** -0.2) for n in (1e4, 3e4, 6e4, 1e5)]
    assert [form_of(some).terms for some in (points, grid(), grid()[:5])] == [1, 2, 1]
    law = fit(points)
    assert law.described() == pytest.approx({"E": 0.8, "A": 300, "a": 0.2}, rel=1e-3)
    target = Point(4e5, 8e6, 0)
    low, high = interval([each(target) for each in drawn(points, law, Form(1), 20)])
    assert low < law(target) < high
    assert fit(points, Form(1, (0.2,))).described() == pytest.approx({"E": 0.8, "A": 300, "a": 0.2}, rel=1e-3)
    with pytest.raises(ValueError, match="2 finished runs: a law needs at least 3"):
        fit(points[:2])


def test_an_outlier_counts_less_than_in_least_squares() -> None:
    points = grid()
    points[4] = replace(points[4], loss=points[4].loss * 1.05)
    assert fit(points)(Point(1e8, 2e9, 0)) == pytest.approx(loss_of(1e8, 2e9), rel=1e-2)


def test_four_runs_predict_a_fifth() -> None:
    """The prediction was committed before the fifth run began. Fitting the scaling law to the four smaller runs
    reproduces the recorded prediction."""
    found = json.loads(MEASURED.read_text())
    points = [Point(*(each[name] for name in ("parameters", "tokens", "loss"))) for each in found["points"]]
    target = Point(found["target"]["parameters"], found["target"]["tokens"], math.nan)
    assert target.compute > 4 * max(point.compute for point in points)
    assert fit(points)(target) == pytest.approx(found["predicted"]["loss"], rel=1e-6)
    assert found["predicted"]["loss"] == pytest.approx(found["measured"]["loss"], rel=0.01)
    assert found["predicted_at"] < found["measured"]["began_at"]


def test_the_curve_of_the_fifth_run() -> None:
    """The test checks what the documentation states about the predicted curve: how far the measured losses are below
    the prediction, and how many of them are below the predicted range."""
    found = json.loads(MEASURED.read_text())
    runs, curve, target = found["points"], found["curve"], found["target"]
    form = Form(1, (fit([Point(each["parameters"], each["tokens"], each["loss"]) for each in runs]).exponents))
    for number in (1, 6):
        law = fit([Point(each["parameters"], each["tokens"], each["evaluations"][number]) for each in runs], form)
        assert law(Point(target["parameters"], target["tokens"], math.nan)) == pytest.approx(
            curve[number]["loss"], 1e-4
        )
    below = [1 - each["measured"] / each["loss"] for each in curve[:9]]
    assert 0.003 < min(below) < 0.0035 and 0.058 < max(below) < 0.0585
    outside = [1 - each["measured"] / each["low"] for each in curve if each["measured"] < each["low"]]
    assert len(curve) == 10 and len(outside) == 2 and max(outside) < 0.007


MUTANTS = (
    ("a law of parameters alone", "variables", "(point.compute,)", "(point.parameters,)"),
    ("the other sign of an exponent", "fit", "np.exp(-exponents * logs)", "np.exp(exponents * logs)"),
    ("losses without logs", "fit", "- np.log(losses)", "- losses"),
)


@pytest.mark.parametrize(("function", "old", "new"), [each[1:] for each in MUTANTS], ids=[each[0] for each in MUTANTS])
def test_every_mutant_is_detected(function: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(getattr(scaling_law, function))
    assert source.count(old) == 1
    there = dict(vars(scaling_law))
    exec(source.replace(old, new), there)
    monkeypatch.setattr(scaling_law, function, there[function])
    points = [Point(n, 20 * n * n / 1e4, 0.8 + 300 * (120 * n**3 / 1e4) ** -0.2) for n in (1e4, 3e4, 6e4, 1e5)]
    fitted = there["fit"](points, Form(1)) if function == "fit" else fit(points, Form(1))
    assert fitted.described() != pytest.approx({"E": 0.8, "A": 300, "a": 0.2}, rel=1e-3)


def ladder_of(*flags: str, **wanted: Any) -> Ladder:
    return build_ladder([*TARGET, *flags], Wanted(**{"widths": (16, 32), "evaluations": 4} | wanted))


def test_rungs_are_smaller_versions_of_the_target() -> None:
    ladder = ladder_of("--lr-warmup-iters", "40")
    small, large = ladder.rungs
    changes = dict(small.changes)
    assert {
        name: changes[name] for name in ("hidden_size", "num_attention_heads", "ffn_hidden_size", "num_layers")
    } == {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "ffn_hidden_size": 32,
        "num_layers": 2,
    }
    ratio = ladder.target.size.tokens / ladder.target.size.parameters
    assert small.size.tokens / small.size.parameters == pytest.approx(ratio, rel=0.05)
    assert small.size.iterations % 4 == 0 and changes["train_iters"] == small.size.iterations
    assert changes["lr_warmup_iters"] == round(40 * small.size.iterations / 400)
    assert large.size.compute > small.size.compute
    rates = ladder_of(rates=(1e-2, 2e-2), swept=(16,)).rungs
    assert [(rung.size.hidden_size, rung.rate) for rung in rates] == [(16, 1e-2), (16, 2e-2), (32, 1e-2)]
    deeper = ladder_of(widths=(16,), depths=(1,), ratios=(10, 20)).rungs
    assert [(each.size.num_layers, round(each.size.tokens / each.size.parameters)) for each in deeper] == [
        (1, 10),
        (1, 20),
    ]


@pytest.mark.parametrize(
    ("flags", "wanted", "told"),
    [
        ((), {"widths": ()}, "--widths: pass at least one width, or pass --depths"),
        ((), {"widths": (24, 40), "depths": (1,)}, "--depths: has 1 values, but --widths has 2"),
        ((), {"widths": (24,)}, "--widths 24: --num-attention-heads 4 cannot be scaled to a whole number"),
        ((), {"widths": (64,)}, "needs at least as much compute as the target"),
        ((), {"evaluations": 500}, "--evaluations 500: is more than the target's 400 iterations"),
        (("--eval-iters", "0"), {}, "--eval-iters 0: a ladder compares validation losses"),
        (("--lr-schedule", "hold rest, linear 800 samples"), {}, "`linear 800 samples` does not shrink with the run"),
        (("--step-batch-size-schedule", "0:2 1K:4"), {}, "a ladder needs a constant batch size"),
        (("--lr", "-1"), {}, "--lr"),
        ((), {"ratios": (20, 0)}, "--tokens-per-parameter 0: must be above 0"),
        ((), {"ratios": (math.nan,)}, "--tokens-per-parameter nan: must be above 0 and finite"),
        ((), {"rates": (1e-3, -1)}, "--rates -1: must be above 0"),
        ((), {"rates": (4e-3,)}, "--rates 0.004: is a single rate, but the target has --lr 0.01"),
        ((), {"widths": (-16, 0)}, "--widths -16: must be above 0 and finite; pass another value\n--widths 0: must"),
        ((), {"widths": (16,), "depths": (0,)}, "--depths 0: must be above 0"),
        ((), {"rates": (1e-3, 2e-3), "swept": (99,)}, "--sweep-widths 99: is not one of --widths"),
        ((), {"swept": (16,)}, "--sweep-widths 16: has no effect without --rates"),
    ],
)
def test_invalid_ladders_are_refused(flags: tuple[str, ...], wanted: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        ladder_of(*flags, **wanted)


def reached(ladder: Ladder, noise: float = 0.0) -> list[Outcome]:
    """Return synthetic outcomes whose losses decrease with compute and during a run. The learning rate 0.01 gives the
    lowest loss."""
    found = []
    for number, rung in enumerate(ladder.rungs):
        last = 0.8 + 30 * rung.size.compute**-0.2 + math.log(rung.rate / 0.01) ** 2 / 50
        losses = {each: last * (1 + 0.1 * (4 - each)) for each in range(1, 5)}
        found.append(Outcome(rung, {each: loss * (1 + noise * (-1) ** number) for each, loss in losses.items()}, 4))
    return found


def test_a_prediction_has_a_curve_a_rate_and_its_limits(tmp_path: Path) -> None:
    ladder = ladder_of(widths=(16, 32, 48), rates=(5e-3, 1e-2, 2e-2))
    found = reached(ladder)
    prediction = predict(ladder, found, swept_rates(found))
    loss = 0.8 + 30 * ladder.target.size.compute**-0.2
    assert prediction["predicted"]["loss"] == pytest.approx(loss, rel=1e-3)
    assert prediction["curve"][1]["loss"] == pytest.approx(1.2 * loss, rel=1e-3)
    assert prediction["rate"]["best"] == pytest.approx(1e-2, rel=1e-3)
    told = "\n".join(lines(prediction))
    assert "the law has 3 coefficients, but only 3 runs: no run is left to check the law" in told
    assert "do not separate the effects of parameters and tokens" in told
    assert "without muP, the best rate has an interval only if" not in told
    file = tmp_path / "ladder.json"
    file.write_text(json.dumps(prediction))
    expected = read_expectation(file)
    assert expected.tokens == ladder.target.size.tokens
    middle = expected.at(expected.tokens * 0.6)
    assert middle is not None and expected.curve[2].loss < middle.loss < expected.curve[1].loss
    assert expected.at(1) is None and expected.at(expected.tokens * 1.1) is None
    assert prediction["target"]["batch_size"] == 4 and prediction["target"]["lr"] == 1e-2
    size = ladder.target.size
    longer = replace(ladder, target=replace(ladder.target, size=replace(size, tokens=round(1.2 * size.tokens))))
    assert "tokens per parameter, but the rungs have" in "\n".join(lines(predict(longer, found)))
    assert "tokens per parameter, but the rungs have" not in told
    far = replace(ladder, target=replace(ladder.target, size=replace(ladder.target.size, tokens=10**9)))
    told = "\n".join(lines(predict(far, reached(ladder, noise=0.02), [BestRate(1e4, 2e-2, bracketed=False)])))
    assert "times the compute of the largest rung" in told and "tokens per parameter, but the rungs have" in told
    assert "the best rate, 0.02, is the first or last rate of the sweep" in told


def test_swept_sizes_also_use_the_rate_of_the_others() -> None:
    ladder = ladder_of(widths=(16, 32, 48), rates=(2e-3, 4e-3), swept=(16, 32))
    rates = [[rung.rate for rung in ladder.rungs if rung.size.hidden_size == width] for width in (16, 32, 48)]
    assert rates == [[2e-3, 4e-3, 1e-2], [2e-3, 4e-3, 1e-2], [1e-2]]
    found = reached(ladder)
    assert [each.rung.rate for each in of_law(found, 1e-2)] == [1e-2] * 3
    old = [
        replace(each, losses={}) if each.rung.rate == 1e-2 and each.rung.size.hidden_size < 48 else each
        for each in found
    ]
    assert [each.rung.size.hidden_size for each in of_law(old, 1e-2)] == [48]
    with pytest.raises(ValueError, match="no run at the target's learning rate: h16") as error:
        predict(ladder, old)
    assert "because they have not finished: h16" in str(error.value)
    everywhere = reached(ladder_of("--lr", "0.5", widths=(16, 32, 48), rates=(2e-3, 1e-2)))
    assert [each.rung.rate for each in of_law(everywhere, 0.5)] == [1e-2] * 3
    told = predict(ladder_of("--lr", "0.5", rates=(2e-3, 1e-2)), everywhere)["unknown"]
    assert "the law fits runs at learning rates of 0.01, but the target has 0.5: the law does not cover it" in told


def test_a_diverged_rung_is_finished_but_excluded_from_the_fit(tmp_path: Path) -> None:
    ladder = ladder_of(widths=(16, 32, 48, 32), depths=(2, 2, 2, 1), rates=(5e-3, 1e-2, 2e-2))
    for each in reached(ladder):
        (tmp_path / each.rung.name).mkdir()
        worst = each.rung.rate == 2e-2 or each.rung.size.num_layers == 1
        losses = {number: math.nan if number == 4 and worst else loss for number, loss in each.losses.items()}
        records = [
            {"iteration": number * ladder.interval(each.rung), "valid_loss": loss if loss == loss else "NaN"}
            for number, loss in losses.items()
        ]
        (tmp_path / each.rung.name / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    found = outcomes(ladder, tmp_path)
    assert sum(each.diverged for each in found) == 6 and all(each.done == 1 for each in found)
    assert table(found).count(",100%,diverged\n") == 6
    prediction = predict(ladder, found, rates := swept_rates(found))
    assert len(prediction["rungs"]) == 3 and "because they diverged: h16-" in prediction["unknown"][0]
    assert [(rate.rate, rate.bracketed) for rate in rates] == [(1e-2, True)] * 3
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "valid_loss": NaN}')
    bare = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert math.isnan(valid_loss(bare) or 0) and valid_loss({"valid_loss": "NaN?"}) is None


def test_no_rung_is_trained_if_the_law_cannot_be_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--output", str(tmp_path / "ladder"), "--evaluations", "4", "--widths", "16", "32"]
    with pytest.raises(ValueError, match="make runs of 2 sizes, and a law needs 3"):
        main([*own, "--", *TARGET])
    monkeypatch.setattr("tools.ladder.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="fitting a law needs scipy"):
        main([*own, "48", "--", *TARGET])
    assert not (tmp_path / "ladder").exists()


def test_the_best_rate_is_extrapolated_to_a_larger_model() -> None:
    falling = [BestRate(n, 0.01 * (n / 1e4) ** -0.5, bracketed=True) for n in (1e4, 4e4, 1.6e5)]
    found = rate_of_target(falling, 6.4e5, transfers=False)
    assert found == pytest.approx((0.00125,) * 3)
    found = rate_of_target(falling, 6.4e5, transfers=True)
    assert found == pytest.approx((0.005, 0.0025, 0.01))
    assert rate_of_target([BestRate(1e4, 0.01, bracketed=False)], 1e5, transfers=True) is None


def test_a_rung_is_trained_once_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*TARGET, "--train-iters", "40"]
    own = ["--output", str(tmp_path), "--widths", "16", "--evaluations", "2", "--tokens-per-parameter", "0.02"]
    assert main([*own, "--rung", "0", "--", *flags, "--exit-interval", "2"]) == 0
    (folder,) = [each for each in tmp_path.iterdir() if each.is_dir()]
    found = outcomes(build_ladder(flags, Wanted((16,), (), (0.02,), evaluations=2)), tmp_path)
    assert (found[0].done, found[0].loss) == (0.5, None)
    assert ",50%," in table(found)
    assert main([*own, "--rung", "0", "--", *flags]) == 0
    screen = (folder / "screen.log").read_text()
    assert "starting at iteration 2" in screen
    assert main([*own, "--rung", "0", "--", *flags]) == 0
    assert (folder / "screen.log").read_text() == screen
    with pytest.raises(ValueError, match="1 finished runs: a law needs at least 3"):
        main([*own, "--fit", "--", *flags])
    other = [*flags, "--seed", "77", "--weight-decay", "0.5"]
    told = r"other flags \(--weight-decay 0.01 there, 0.5 here, --seed 1234 there, 77 here\); choose another --output"
    for what in (["--fit"], ["--rung", "0"]):
        with pytest.raises(ValueError, match=told):
            main([*own, *what, "--", *other])
    with pytest.raises(ValueError, match="--rung 1: must be from 0 to 0"):
        main([*own, "--rung", "1", "--", *flags])


def test_a_job_array_has_one_task_per_rung(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--output", str(tmp_path / "ladder"), "--widths", "16", "32", "--sbatch-option=--time=1:00:00"]
    assert main([*own, "--sbatch", "--print", "--", *TARGET]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --time=1:00:00\n" in script
    task = shlex.split(script.splitlines()[-1].replace('"$SLURM_ARRAY_TASK_ID"', "1"))[3:]
    assert task[:2] == ["--rung", "1"] and task[task.index("--") + 1 :] == TARGET
    assert not (tmp_path / "ladder").exists()
    assert main([*own, "--sbatch", "--", *TARGET]) == 0
    assert (tmp_path / "ladder" / "ladder.sbatch").read_text() == script
    capsys.readouterr()
    assert main([*own, "--print", "--", *TARGET]) == 0
    assert capsys.readouterr().out.count("pretrain_gpt.py") == 2


def expectation(path: Path, low: float) -> str:
    """Write a predicted loss curve for the run that `RUN` describes, and return the path as a string. The run trains on
    128 tokens and is evaluated after 64 and 128 tokens."""
    curve = [{"tokens": tokens, "loss": 3.9, "low": low, "high": 4.2} for tokens in (64, 128)]
    parameters = counted_parameters(load_config(RUN.split())[0].model)
    target = {"hidden_size": 16, "num_layers": 2, "parameters": parameters, "tokens": 128, "batch_size": 4, "lr": 1e-2}
    path.write_text(json.dumps({"schema": 1, "target": target, "curve": curve}))
    return str(path)


RUN = f"{TINY} --eval-iters 1 --eval-interval 2"


def test_a_run_logs_its_deviation_and_warns_outside_the_band(tmp_path: Path) -> None:
    for name, low, warned in (("inside", 3.0, 0), ("outside", 4.1, 1)):
        save = tmp_path / name
        flags = f"{RUN} --save {save} --expect {expectation(tmp_path / 'ladder.json', low)}"
        told = run_forked(1, flags.split(), tmp_path / f"{name}.screen")
        records = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
        losses = [record["valid_loss"] for record in records if "valid_loss" in record]
        found = [record for record in records if "distance_from_expected" in record]
        assert [record["iteration"] for record in found] == [2, 4]
        assert [record["distance_from_expected"] for record in found] == [loss / 3.9 - 1 for loss in losses]
        assert told.count("WARNING: the validation loss") == warned
        events = (save / "run_events.jsonl").read_text()
        assert events.count('"unexpected loss"') == warned


def test_a_prediction_of_another_run_is_refused(tmp_path: Path) -> None:
    path = expectation(tmp_path / "ladder.json", 3.0)
    for flags, told in (
        ("--hidden-size 32", "predicts a model of --hidden-size 16, but this one has 32"),
        ("--num-layers 3", "predicts a model of --num-layers 2, but this one has 3"),
        ("--ffn-hidden-size 256", "parameters, but this one has "),
        ("--lr 2e-2", "predicts a run of --lr 0.01, but this one has 0.02"),
        ("--global-batch-size 8 --train-iters 2", "predicts a run of --global-batch-size 4, but this one has 8"),
        ("--train-iters 5", "predicts a run of 128 tokens, but this one has 160"),
        ("--eval-iters 0", "has no effect without an evaluation"),
    ):
        problems = findings(parse_args(f"{RUN} --expect {path} {flags}".split()), 1)
        assert told in "\n".join(map(str, problems))
    assert validate(parse_args(f"{RUN} --expect {tmp_path}".split()), 1) == []
    Path(path).write_text("{}")
    assert "contains no ladder prediction" in str(validate(parse_args(f"{RUN} --expect {path}".split()), 1))
