"""Tests of commands that an extension registers, and of callbacks that count FLOPs and explain failures."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron.core.config.model import TransformerConfig
from megatron.training.config.arguments import command_line, parse_args
from megatron.training.config.commands import COMMANDS, Command, GivenOptions, Option, Prepared
from megatron.training.config.prepare import prepare
from megatron.training.hooks import Callback, tell_of_failure
from megatron.training.metrics.summary import flops_per_token, utilization
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun

pytestmark = pytest.mark.usefixtures("forget_extensions_at_once")

RUN = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 64 --lr 1e-3 --mock-data "
RUN += "--train-iters 2"


@dataclass(frozen=True)
class Count(Command):
    """Command that prints the number of ranks."""

    times: int | None

    def run(self, run: Prepared) -> int:
        if run.problems:
            run.refuse(run.problems)
        print(f"{self.times} times {run.world_size} ranks of {run.config.model.num_layers} layers")
        return 7


def count(given: GivenOptions, world_size: int | None) -> Command | None:
    times = given.number("--times", "say how often")
    return Count(times) if "--count" in given.options else None


@pytest.fixture(autouse=True)
def counted() -> None:
    """Register only the command `Count`, without the commands of built-in extensions."""
    COMMANDS._entries.clear()
    options = {
        "--count": Option("Count the ranks.", command=True),
        "--times": Option("How often.", "INT"),
        "--written": Option("Where to.", "[FILE]", json=True),
    }
    COMMANDS.register("count", count, options=options)


def ended(flags: str) -> int:
    with pytest.raises(SystemExit) as end:
        prepare(command_line([*RUN.split(), *flags.split()], Launch()), Launch())
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_command_runs_in_place_of_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--count --times 3 --tp 2 --dp 2") == 7
    out, err = capsys.readouterr()
    assert out == "3 times 4 ranks of 2 layers\n"
    assert "planned for 4 ranks; --world-size sets a different number" in err.splitlines()
    assert ended("--count --world-size 8") == 7
    assert capsys.readouterr().out == "None times 8 ranks of 2 layers\n"


def test_problems_of_a_command_are_reported_with_all_other_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--count --times 0 --tp 3 --written") == 2
    out, err = capsys.readouterr()
    assert "--times 0: must be a whole number above 0; say how often" in err and "--tensor-model-parallel-size 3" in err
    assert json.loads(out)["problems"][0]["flag"] == "--times"
    assert ended("--count --times 1000000000000000000") == 2
    assert "--times 1000000000000000000: must not be larger than 2^53" in capsys.readouterr().err
    assert ended("--count 3") == 2
    assert "--count 3: takes no value; given: 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--global-batch-size 0", "--global-batch-size 0: must be above 0; give another number, or remove it"),
        ("--global-batch-size -4", "--global-batch-size -4: must be above 0; give another number, or remove it"),
        ("--tp 2", "world size 1: must be a multiple of TP 2 * PP 1 * CP 1 = 2; start 2 ranks (torchrun "),
    ],
)
def test_a_run_without_a_batch_size_is_one_problem(
    flags: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags do not determine a valid batch size. Only this problem is reported, and no problems that result from
    it."""
    assert ended(flags) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  ")]
    assert said.startswith(f"  {problem}")


def test_two_commands_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    COMMANDS.register("other", lambda given, world_size: None, options={"--other": Option("Else.", command=True)})
    assert ended("--other --count") == 2
    assert "--other: cannot be combined with --count; keep one of them" in capsys.readouterr().err
    assert ended("--world-size 3") == 2
    assert "start 3 processes with torchrun or srun, or add --count or --other" in capsys.readouterr().err


def test_help_lists_options_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line(["--help"], Launch())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("  --count", "  --times", "  --written"))] == [
        "  --count                         Count the ranks.",
        "  --times INT                     How often.",
        "  --written [FILE]                Where to.",
    ]


def test_options_of_an_extension_that_is_not_installed_name_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--dry-run") == 2
    said = capsys.readouterr().err
    assert "--dry-run: is a flag of the extension planner, which is not installed; restore megatron/extensions/" in said


def test_utilization_needs_a_count_of_flops() -> None:
    config, device = parse_args(RUN.split()), torch.device("cpu")
    assert utilization(config, device, 0.0) == {}
    assert utilization(config, device, 10.0) == {"tflops_per_device": 10.0, "mfu": None}
    with_peak = parse_args([*RUN.split(), "--peak-tflops", "40"])
    assert utilization(with_peak, device, 10.0) == {"tflops_per_device": 10.0, "mfu": 0.25}


def test_the_last_callback_that_counts_flops_is_used() -> None:
    class Counts(Callback):
        def flops_per_token(self, model: TransformerConfig) -> float:
            return 2.0 * model.num_layers

    config = parse_args(RUN.split())
    own, silent = Counts(config), Callback(config)
    run = SimpleNamespace(config=config, callbacks=[Callback(config), own, silent])
    assert flops_per_token(cast("TrainingRun", run)) == 2.0 * config.model.num_layers
    assert flops_per_token(cast("TrainingRun", SimpleNamespace(config=config, callbacks=[silent]))) == 0


def test_callbacks_explain_failures_and_hide_none() -> None:
    called: list[tuple[type, int, object]] = []

    class Explains(Callback):
        name = "reason"

        def on_failure(self, error: BaseException, launch: Launch, run: TrainingRun | None) -> None:
            called.append((type(error), launch.rank, run))
            raise KeyError("broken")

    config, run = parse_args(RUN.split()), cast("TrainingRun", SimpleNamespace())
    error = IndexError("first")
    tell_of_failure(error, [Callback(config), Explains(config)], Launch(rank=1, world_size=2), run)
    assert called == [(IndexError, 1, run)]
    assert error.__notes__ == ["no reason: KeyError: 'broken'"]
