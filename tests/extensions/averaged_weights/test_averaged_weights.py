"""Test that moving averages of the weights match their definition under every layout. A resumed run computes
bit-identical averages. The averages can also be used for evaluation."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

import pretrain_gpt
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.optim.averaged_weights.averages import MovingAverages, _move_
from megatron.extensions.optim.averaged_weights.flags import averages_of
from megatron.extensions.plan.planner.memory import callback_bytes, planned_buffers, states_of_rank
from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal, validate
from megatron.training.evaluation import evaluate
from megatron.training.hooks import Log, RunView
from megatron.training.train_step import train_step
from tests.dist.test_callback_states import LAYOUTS
from tests.forked import run_forked, run_program
from tests.harness import run_world
from tests.tiny import TINY

STEPS = 4
RUN = f"{TINY} --eval-iters 2 --eval-interval 2 --train-iters {STEPS} --save-interval 1 --log-interval 1 --lr 1e-2"
AVERAGES = "--ema-decay 0.5 0.9 --ema-half-life-tokens 100"
NAMES = ("decay_0_5", "decay_0_9", "half_life_100")


def config_of(flags: str, world_size: int) -> RunConfig:
    return resolve_legal(parse_args(f"{RUN} {flags}".split()), world_size)


def checkpoint(run: Path, iteration: int) -> Checkpoint:
    return Checkpoint(run / f"iter_{iteration:07d}")


def trained(folder: Path, ranks: int, flags: str) -> Path:
    run_forked(ranks, f"{RUN} {flags} --save {folder}".split(), folder.with_suffix(".screen"))
    return folder


def main_params(found: Checkpoint) -> dict[str, Tensor]:
    names = [key.removeprefix("model.") for key in found.tensors if key.startswith("model.")]
    main = {name: f"optimizer.main_param.{name}" for name in names}
    return {name: found.read(main[name] if main[name] in found.tensors else f"model.{name}") for name in names}


def decays(config: RunConfig) -> dict[str, float]:
    tokens = (config.training.global_batch_size or 0) * config.model.seq_length
    return {"decay_0_5": 0.5, "decay_0_9": 0.9, "half_life_100": 0.5 ** (tokens / 100)}


MORE_LAYOUTS = {
    "zero2": (2, "--data-parallel-sharding-strategy optim_grads"),
    "cp2": (2, "--context-parallel-size 2"),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2-interleaved": (2, "--num-layers 4 --pp 2 --num-layers-per-virtual-pipeline-stage 1"),
}
"""Layouts that are tested in addition to `LAYOUTS`."""

FP32 = [(layout, "--fp32") for layout in LAYOUTS | MORE_LAYOUTS]
BF16 = [(layout, "--bf16") for layout in LAYOUTS]
"""Cases in which the main parameters are averaged. Some cases shard the optimizer states (zero1) or the weights
(zero3)."""


@pytest.mark.grid(("layout", "precision"), [*FP32, ("zero1", "--bf16"), ("zero3", "--bf16")], [*FP32, *BF16])
def test_averages_match_their_definition_under_every_layout(layout: str, precision: str, tmp_path: Path) -> None:
    """The expected averages are computed in fp64 from the main parameters in checkpoints that are saved after each
    step."""
    ranks, flags = (LAYOUTS | MORE_LAYOUTS)[layout]
    run = trained(tmp_path / "run", ranks, f"{precision} {AVERAGES} {flags}")
    weights = [main_params(checkpoint(run, step)) for step in range(1, STEPS + 1)]
    found = checkpoint(run, STEPS)
    for name, decay in decays(config_of("", 1)).items():
        for parameter, first in weights[0].items():
            expected = first.double()
            for after in weights[1:]:
                expected = decay * expected + (1 - decay) * after[parameter].double()
            average = found.read(f"callbacks.ema.{name}.{parameter}")
            assert average.dtype == torch.float32
            torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("before", "after"), [("zero1", "zero1"), ("zero3", "zero3"), ("tp2-dp2", "pp2-tied")])
def test_averages_resume_exactly_and_under_another_layout(before: str, after: str, tmp_path: Path) -> None:
    precision = "--bf16" if before == after else "--fp64"
    ranks, flags = LAYOUTS[before]
    whole = trained(tmp_path / "whole", ranks, f"{precision} {AVERAGES} {flags}")
    ranks, flags = LAYOUTS[after]
    trained(tmp_path / "on", ranks, f"{precision} {AVERAGES} {flags} --load {whole / 'iter_0000002'}")
    one, two = checkpoint(whole, STEPS), checkpoint(tmp_path / "on", STEPS)
    keys = [key for key in one.tensors if key.startswith("callbacks.ema.")]
    assert len(keys) == 3 * sum(key.startswith("model.") for key in one.tensors)
    for key in keys:
        if before == after:
            assert torch.equal(one.read(key), two.read(key)), key
        else:
            torch.testing.assert_close(one.read(key), two.read(key), rtol=1e-9, atol=1e-11)


def test_bf16_averages_on_the_host_match_their_definition(tmp_path: Path) -> None:
    """The averages match their definition within bf16 rounding. If a run resumes between two updates, its averages are
    bit-identical to those of an uninterrupted run."""
    flags = f"--fp32 {AVERAGES} --ema-dtype bf16 --ema-on-host --ema-interval 2 {LAYOUTS['zero1'][1]}"
    whole = trained(tmp_path / "whole", 2, flags)
    trained(tmp_path / "on", 2, f"{flags} --load {whole / 'iter_0000003'}")
    one, two = checkpoint(whole, STEPS), checkpoint(tmp_path / "on", STEPS)
    first, last = main_params(checkpoint(whole, 2)), main_params(one)
    for name, decay in decays(config_of("", 1)).items():
        for parameter, weight in first.items():
            average = one.read(f"callbacks.ema.{name}.{parameter}")
            assert torch.equal(average, two.read(f"callbacks.ema.{name}.{parameter}"))
            expected = decay**2 * weight + (1 - decay**2) * last[parameter]
            assert average.dtype == torch.bfloat16
            torch.testing.assert_close(average.float(), expected, rtol=2**-6, atol=1e-4)


def test_small_changes_of_an_average_in_bf16_count() -> None:
    """With a decay of 0.999, 1,000 updates move an average from 1 to 1 + 0.1 * (1 - 1/e), if the weight is 1.1. If
    updates were rounded to nearest, the average would stay at 1."""
    averages, weights = [torch.ones(4096, dtype=torch.bfloat16)], [torch.full((4096,), 1.1) + 1e-3 * torch.randn(4096)]
    for step in range(1000):
        _move_(averages, weights, 1 - 0.999, step)
    assert float(averages[0].float().mean()) == pytest.approx(1 + 0.1 * (1 - math.exp(-1)), abs=1e-3)


def test_averages_do_not_change_a_bit_of_training(tmp_path: Path) -> None:
    run, plain = trained(tmp_path / "run", 2, AVERAGES), trained(tmp_path / "plain", 2, "")
    one, two = checkpoint(run, STEPS), checkpoint(plain, STEPS)
    assert all(torch.equal(one.read(key), two.read(key)) for key in two.tensors)


def losses(rank: int, world_size: int, config: RunConfig) -> tuple[float, float]:
    """Return two validation losses: one with the averaged weights, and one with the trained weights. Also check that
    the states have the planned size in bytes."""
    with local_run(config, rank, world_size) as run:
        (average,) = [callback for callback in run.callbacks if isinstance(callback, MovingAverages)]
        callbacks, records = run.callbacks, list[dict[str, float]]()
        log = cast("Log", SimpleNamespace(write=records.append, say=print))
        average.on_start(run)
        for _ in range(2):
            train_step(run)
            average.on_step_end(run)
        for run.callbacks in (callbacks, ()):
            evaluate(run, "valid", log)
        dims = ParallelDims.from_config(config.parallel, world_size)
        metas = states_of_rank(config, dims, dims.coords(rank)["pp"]).metas
        held = {piece.data.untyped_storage().data_ptr(): piece.data.untyped_storage() for piece in average.states}
        assert (
            sum(map(len, held.values()))
            == sum(callback_bytes(config, planned_buffers(config, dims, metas)).values())
            > 0
        )
        return records[0]["valid_loss"], records[1]["valid_loss"]


def test_averages_are_evaluated_on_demand() -> None:
    flags = f"--fp32 {AVERAGES} --eval-weights ema"
    (expected,) = run_world(1, losses, config_of(flags, 1))
    assert expected[0] != expected[1]
    for layout in ("tp2-dp2", "zero3"):
        ranks, more = LAYOUTS[layout]
        found = run_world(ranks, losses, config_of(f"{flags} {more}", ranks))
        assert found == [pytest.approx(expected, rel=1e-5)] * ranks


def test_a_checkpoint_is_evaluated_with_its_averages(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 1, f"{AVERAGES} --eval-weights ema")
    found = {}
    for weights in ("ema", "trained"):
        words = f"{AVERAGES} --load {run} --skip-train --eval-weights {weights}"
        lines = (trained(tmp_path / weights, 1, words) / "metrics.jsonl").read_text().splitlines()
        found[weights] = [line["valid_loss"] for line in map(json.loads, lines) if "valid_loss" in line][-1]
    lines = (run / "metrics.jsonl").read_text().splitlines()
    of_run = [line["valid_loss"] for line in map(json.loads, lines) if "valid_loss" in line][-1]
    assert found["ema"] == of_run != found["trained"]


def test_a_missing_average_is_not_replaced_silently(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", 1, f"{AVERAGES} --eval-weights ema --ema-interval 3")
    assert (tmp_path / "run.screen").read_text().count("decay_0_5 has not started, so the trained weights") == 1
    steps = checkpoint(run, STEPS).payload["callbacks"]["ema"]["steps"]
    assert steps == dict.fromkeys(NAMES, 1)
    words = f"{RUN} --load {run} --skip-train --eval-weights ema --ema-decay 0.55"
    found = run_program("pretrain_gpt.py", *words.split())
    assert found.returncode and "valid loss" not in found.stdout
    assert (
        f"the checkpoint has no decay_0_55, but {', '.join(NAMES)}; select one of these" in found.stdout + found.stderr
    )


def test_averages_that_a_run_does_not_keep_are_not_counted_in_its_checkpoint() -> None:
    average = MovingAverages(config_of("--ema-decay 0.9 --eval-weights ema --skip-train --load runs/a", 1))
    view = cast("RunView", SimpleNamespace(progress=SimpleNamespace(iteration=4, consumed_samples=16)))
    average.load_state({"steps": {"decay_0_5": 4}, "updated": [4, 16]})
    with pytest.raises(ValueError, match="no decay_0_9, but decay_0_5; select one of these"):
        average.on_start(view)
    assert average.state() == {"steps": {}, "updated": [4, 16]}
    average.load_state(None)
    with pytest.raises(ValueError, match="the checkpoint has no averaged weights"):
        average.on_start(view)


def test_averages_have_names_and_rules() -> None:
    assert tuple(average.name for average in averages_of(config_of(AVERAGES, 1))) == NAMES
    assert averages_of(config_of("", 1)) == ()
    for flags, rule in (
        ("--eval-weights ema", "--eval-weights ema: needs averaged weights"),
        (
            f"{AVERAGES} --pipeline-schedule 2bw",
            "--ema-decay 0.5 0.9: needs the weights after each step, but --pipeline-schedule 2bw",
        ),
        ("--ema-decay 1", "--ema-decay"),
        ("--ema-half-life-tokens 0", "--ema-half-life-tokens"),
    ):
        problems = validate(parse_args(f"{RUN} {flags}".split()), 1)
        assert [problem for problem in problems if str(problem).startswith(rule)], problems


def test_a_plan_names_the_averages_with_their_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    """An fp32 average takes 4 bytes per trained element in a one-process run."""
    with pytest.raises(SystemExit):
        pretrain_gpt.main(f"{RUN} --bf16 --ema-decay 0.9 --dry-run --world-size 1".split())
    out = capsys.readouterr().out
    (line,) = [line.strip() for line in out.splitlines() if "states of callback" in line]
    found = re.fullmatch(r"states of callback ema: decay_0_9 float32 .*, at most ([\d,]+) bytes on a rank", line)
    assert found is not None and int(found[1].replace(",", "")) % 4 == 0, line
