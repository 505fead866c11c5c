"""Piecewise learning rate schedules follow their formulas. Branches of a run continue exactly from the state of the
original run."""

from __future__ import annotations

import inspect
import json
import math
import shutil
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing.path_kind import METADATA
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.extensions.data.phases.plan import PhasePlan
from megatron.extensions.optim.schedules import pieces as schedule_pieces
from megatron.extensions.optim.schedules.flags import ScheduleFlags
from megatron.extensions.optim.schedules.pieces import Rates, absolute, parse, rate_at, without_tokens
from megatron.training.config.arguments import parse_args
from megatron.training.config.prepare import load_config
from megatron.training.config.validation import findings, resolve, resolve_legal, validate
from megatron.training.plan import plan_of
from tests.forked import run_forked
from tests.tiny import TINY

RATES = Rates(first=0.0, peak=2.0, lowest=0.5)


def rates(text: str, *samples: float, total: float = 1000) -> list[float]:
    return [rate_at(parse(text), each, total, RATES) for each in samples]


def of_run(flags: str) -> list[float]:
    """Return the learning rate of each step in a run of 20 steps, with 80 samples of 8 tokens."""
    flags = f"{TINY} --train-samples 80 --lr 0.02 --min-lr 0.002 {flags}".replace("--train-iters 4", "")
    plan = plan_of(resolve_legal(parse_args(words(flags)), 1))
    return [plan.schedule().lr_at(4 * step) for step in range(21)]


def words(flags: str) -> list[str]:
    parts = flags.split('"')
    return [word for number, part in enumerate(parts) for word in ([part] if number % 2 else part.split())]


def test_shapes() -> None:
    assert rates("warm-up 10%, hold rest, linear 20%", 0, 50, 100, 800, 900, 1000, 2000) == [0, 1, 2, 2, 1.25, 0.5, 0.5]
    assert rates("cosine rest to 0", 0, 250, 1000) == pytest.approx([2, 1 + math.cos(math.pi / 4), 0])
    assert rates("sqrt rest to 0", 750, 1000) == [1, 0]
    assert rates("1-sqrt rest to 0.5", 250, 1000) == [1.5, 1]
    several = "warm-up 10%, hold 30%, 1-sqrt 10% to 0.1, warm-up 10%, hold rest, linear 20% to 0"
    assert rates(several, 100, 400, 500, 550, 600, 800, 900, 1000) == pytest.approx([2, 2, 0.2, 1.1, 2, 2, 1, 0])


def test_a_power_law_uses_the_consumed_samples() -> None:
    """The PowerLR schedule (arXiv 2408.13359) is min(peak, peak (n / knee)^-0.51), followed by a decay."""
    text = "warm-up 1%, power rest exponent -0.51 after 200 samples, linear 10% to 0"
    assert rates(text, 5, 10, 200) == [1, 2, 2]
    assert rates(text, 400, 900) == pytest.approx([2 * 2**-0.51, 2 * 4.5**-0.51])
    assert rates(text, 950, 1000) == pytest.approx([4.5**-0.51, 0])
    assert rates("hold 100 samples, power rest exponent -0.5", 100, 400) == [2, 1]


def test_lengths_in_tokens_are_converted_to_samples() -> None:
    text = without_tokens("warm-up 2K tokens # up\nhold rest, power 1e4 tokens exponent -0.5 after 0.5K tokens", 8)
    assert text == "warm-up 250 samples, hold rest, power 1250 samples exponent -0.5 after 62.5 samples"
    assert without_tokens(text, 1) == text
    assert list(absolute("warm-up 1%, hold rest, linear 5 samples")) == ["linear 5 samples"]


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("warm-up 10%, hold rest, 1-sqrt 25%", "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt "
         "--lr-wsd-decay-fraction 0.25 --lr-warmup-fraction 0.1"),
        ("warm-up 64 tokens, cosine rest", "--lr-decay-style cosine --lr-warmup-samples 8"),
        ("warm-up 10%, linear rest", "--lr-warmup-fraction 0.1 --decoupled-lr 0.1"),
        ("hold rest", "--lr-decay-style constant"),
    ],
)  # fmt: skip
def test_pieces_equal_the_named_schedules(text: str, flags: str) -> None:
    assert of_run(f'--lr-schedule "{text}"') == pytest.approx(of_run(flags), abs=1e-17)


def test_a_schedule_counts_samples_under_a_batch_ramp(tmp_path: Path) -> None:
    """The configuration contains the content of the schedule file instead of its name. Each step advances the schedule
    by the number of samples in its batch."""
    file = tmp_path / "schedule.txt"
    file.write_text("warm-up 8 samples  # a comment\nhold 50%\n\n1-sqrt rest\n")
    flags = f"{TINY} --train-samples 80 --lr-schedule-file {file}".replace("--train-iters 4", "")
    config, problems = load_config(flags.split())
    assert not problems
    assert config.options(ScheduleFlags) == ScheduleFlags("warm-up 8 samples, hold 50%, 1-sqrt rest")
    ramped, problems = load_config(f"{flags} --rampup-batch-size 2 2 40".split())
    assert not problems
    one, two = plan_of(config).schedule(), plan_of(ramped).schedule()
    assert [one.lr_at(each) for each in range(81)] == [two.lr_at(each) for each in range(81)]
    file.write_text("hold half")
    assert "`hold half` has no length" in str(load_config(flags.split())[1])


MUTANTS = (
    ("to=1 at a warm-up's start", "rates.peak if piece.to is None else piece.to * rates.peak) - rate", "0) - rate"),
    ("a decay to zero", "rates.lowest if piece.to is None", "0.0 if piece.to is None"),
    ("a power law that rises", "rate * min(1.0, ", "rate * max(1.0, "),
    ("a power law of the piece's samples", "max(begin + here, 1.0)", "max(here, 1.0)"),
    ("a decay from the peak", "* (rate - end)", "* (rates.peak - end)"),
)


@pytest.mark.parametrize(("old", "new"), [mutant[1:] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS])
def test_every_mutant_is_detected(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(schedule_pieces._after)
    assert source.count(old) == 1
    there = dict(vars(schedule_pieces))
    exec(source.replace(old, new), there)
    monkeypatch.setattr(schedule_pieces, "_after", there["_after"])

    def checks() -> None:
        test_shapes()
        test_a_power_law_uses_the_consumed_samples()

    with pytest.raises(AssertionError):
        checks()


REFUSED = (
    (
        '--lr-schedule "warm-up 1%" --lr-warmup-iters 5',
        "--lr-warmup-iters 5: cannot be combined with --lr-schedule: warm-up is a piece of the schedule",
    ),
    (
        '--lr-schedule "hold rest" --lr-decay-style cosine',
        "--lr-schedule hold rest: cannot be combined with --lr-decay-style cosine; keep one of them",
    ),
    (
        '--lr-schedule "fall 10%"',
        "`fall 10%` has no shape; begin it with one of warm-up, hold, linear, cosine, sqrt, 1-sqrt, power",
    ),
    ('--lr-schedule "hold"', "`hold` has no length; write for example 20%, 5e6 samples, 2B tokens or rest"),
    (
        '--lr-schedule "hold rest, linear rest"',
        "has more than one piece with the length `rest`; give the others a length",
    ),
    ('--lr-schedule "hold 90%, linear 20%"', "pieces have 17.6 samples, but the schedule has only 16; shorten some"),
    ('--lr-schedule "linear 1K tokens"', "--lr-schedule linear 1K tokens: its pieces have 125 samples, but"),
    ('--lr-schedule "hold 10% to 0.5"', "hold does not accept `to`; remove it"),
    (
        '--lr-schedule "power 10%"',
        "needs an exponent below 0, and other shapes accept none; for example exponent -0.51",
    ),
    ('--lr-schedule "linear 10% after 5%"', "linear does not accept `after`; remove it"),
    ('--lr-schedule "linear 10% until 5"', "has `until 5` after its length; only to, exponent and after are allowed"),
)


@pytest.mark.parametrize(("flags", "told"), REFUSED)
def test_invalid_schedules_are_refused(flags: str, told: str) -> None:
    problems = validate(parse_args([*TINY.split(), *words(flags)]), 1)
    assert told in "\n".join(map(str, problems))


def test_pieces_that_do_not_cover_the_run_are_reported() -> None:
    for text, said in (
        ("warm-up 10%, linear 30%", True),
        ("warm-up 10%, hold rest", False),
        ("hold 127 tokens", False),
    ):
        given = parse_args([*TINY.split(), "--lr-schedule", text])
        found = [str(each) for each in findings(given, 1, resolve(given, 1)) if each.harmless]
        rule = f"--lr-schedule {text}: its pieces end 9.6 samples before the schedule's 16, and the last rate is held"
        assert [each.startswith(rule) for each in found] == [True] * said


def test_a_phase_with_its_own_rate_repeats_the_pieces(tmp_path: Path) -> None:
    file = tmp_path / "phases.yaml"
    file.write_text("- {}\n- {from-samples: 40, lr: 4e-3}\n")
    flags = f"{TINY} --train-samples 80 --data-phases {file}".replace("--train-iters 4", "")
    config, problems = load_config([*flags.split(), "--lr-schedule", "warm-up 20%, hold 30%, linear rest"])
    assert not problems
    plan = plan_of(config)
    assert isinstance(plan, PhasePlan)
    found = [plan.schedule_of(plan.at(each)).lr_at(each) for each in (8, 16, 20, 48, 60, 70)]
    assert found == pytest.approx([5e-3, 1e-2, 1e-2, 4e-3, 4e-3, 2e-3])


RUN = f"{TINY.replace('--train-iters 4', '')} --fp32 --attention-dropout 0.1 --log-interval 1"
STABLE = "warm-up 25%, hold rest"
BRANCH = "--decay-tokens 100 --decay-shape linear --save-interval 2"


def trained(folder: Path, flags: str) -> list[dict[str, float]]:
    """Train, and return the metric records of the steps."""
    argv = f"{RUN} {flags} --save {folder}".split()
    run_forked(1, [*argv, "--lr-schedule", STABLE], folder.with_suffix(".screen"))
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "lm_loss" in line]


def test_a_branch_continues_from_its_run_and_resumes_bitwise(tmp_path: Path) -> None:
    stable = trained(tmp_path / "stable", "--train-iters 8 --save-interval 4")
    source = tmp_path / "stable" / "iter_0000004"
    branch = f"--train-iters 8 --branch-from {source} {BRANCH}"
    steps = trained(tmp_path / "branch", branch)
    assert [step["iteration"] for step in steps] == [5, 6, 7, 8]  # 100 tokens are 3.125 steps of 32 tokens
    assert [step["learning_rate"] for step in steps] == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
    assert steps[0]["lm_loss"] == stable[4]["lm_loss"]  # proves that the data order, the weights and dropout continue
    assert (
        steps[1]["lm_loss"] == stable[5]["lm_loss"]
    )  # the learning rate is unchanged, so equal losses prove that the optimizer states continue
    assert "linear 16 samples; 128 tokens to its end" in (tmp_path / "branch.screen").read_text()
    trained(tmp_path / "killed", f"{branch} --exit-interval 6")
    shutil.rmtree(tmp_path / "stable")
    trained(tmp_path / "killed", branch)
    trained(tmp_path / "killed", branch)
    assert "to continue, start another branch with a larger --decay-tokens" in (tmp_path / "killed.screen").read_text()
    whole, parts = (Checkpoint(tmp_path / name / "iter_0000008") for name in ("branch", "killed"))
    assert all(torch.equal(whole.read(key), parts.read(key)) for key in whole.tensors)
    origin = {"from": str(source), "iteration": 4, "consumed_samples": 16}
    assert whole.payload["callbacks"] == parts.payload["callbacks"] == {"branch": origin}
    _, problems = load_config([*branch.split(), *TINY.split(), "--decay-tokens", "96", "--save", f"{tmp_path}/killed"])
    assert "the branch in --save began with 100" in str(problems)
    given = [*branch.split(), *TINY.replace("--train-iters 4", "").split(), "--save", f"{tmp_path}/killed"]
    for other in (f"{tmp_path}/stable/iter_0000003", f"{tmp_path}/branch"):
        _, problems = load_config([*given, "--branch-from", other])
        (line,) = map(str, problems)
        assert f"--branch-from {other}: the branch in --save {tmp_path}/killed began from {source}, at" in line
    shutil.copytree(tmp_path / "branch" / "iter_0000008", tmp_path / "moved" / "iter_0000004")
    metadata = tmp_path / "moved" / "iter_0000004" / METADATA
    for key, value in (("iteration", 4), ("consumed_samples", 16)):
        assert load_config([*given, "--branch-from", f"{tmp_path}/moved"])[1]
        metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {key: value}))
    assert not load_config([*given, "--branch-from", f"{tmp_path}/moved"])[1]
    _, problems = load_config([*given, "--branch-from", f"{tmp_path}/killed/iter_0000006"])
    (line,) = map(str, problems)
    assert f"--save {tmp_path}/killed: is the folder of --branch-from" in line
    _, problems = load_config([*branch.split(), *TINY.split(), "--branch-from", "gone", "--save", f"{tmp_path}/new"])
    assert "--branch-from" in str(problems)


def test_a_branch_can_branch_again_and_keeps_the_batch_ramp(tmp_path: Path) -> None:
    ramp = "--rampup-batch-size 2 2 8"
    trained(tmp_path / "stable", f"--train-samples 32 {ramp} --save-interval 5")
    flags = f"{ramp} --train-samples 32 --branch-from {tmp_path / 'stable' / 'iter_0000005'} --decay-tokens 64"
    (first, *_) = trained(tmp_path / "one", flags)
    assert (first["iteration"], first["global_batch_size"], first["learning_rate"]) == (6, 4, 1e-2)
    (second, *_) = trained(tmp_path / "two", f"--train-iters 9 --branch-from {tmp_path / 'one'} --decay-tokens 32")
    found = Checkpoint(tmp_path / "two" / f"iter_{second['iteration']:07d}").payload["callbacks"]["branch"]
    assert found["parent"]["from"].endswith("iter_0000005")
    assert found["from"].startswith(str(tmp_path / "one"))
