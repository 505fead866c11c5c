"""The fastest attention kernel is taken, on all ranks the same one. Clocks here are made up."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatron.core.parallel_state import Axis, initialize_model_parallel
from megatron.core.attention import backend_choice as sdpa
from megatron.core.attention.backend_choice import BACKENDS, AttentionShape, Choice, attention_run, choose_kernel, compare
from megatron.training.config.arguments import parse_args
from megatron.training.setup import attention_shape
from megatron.training.config.validation import resolve
from tests.harness import run_world

CPU = torch.device("cpu")
SHAPE = AttentionShape(16, 2, 4, 2, 8, 8, torch.float32)


def missing() -> None:
    raise RuntimeError("No available kernel. Aborting execution.")


def clock_of(seconds: dict[str, float]) -> Callable[[Callable[[], object]], float]:
    """Takes what a run returns for its name."""
    return lambda run: seconds[str(run())]


RUNS = {"flash": lambda: "flash", "cudnn": lambda: "cudnn"}


@pytest.mark.parametrize(("seconds", "winner"), [((2.0, 1.0), "cudnn"), ((1.0, 2.0), "flash"), ((1.0, 1.0), "flash")])
def test_the_fastest_wins(seconds: tuple[float, float], winner: str) -> None:
    choice = compare(RUNS, clock_of(dict(zip(RUNS, seconds, strict=True))), CPU, Axis())
    assert choice.winner == winner
    assert f"attention kernel: {winner} " in str(choice) and f"cudnn {1e3 * seconds[1]:.2f} ms" in str(choice)


def test_one_that_is_missing_loses() -> None:
    choice = compare({**RUNS, "flash": missing}, clock_of({"cudnn": 9.0}), CPU, Axis())
    assert choice.seconds == {"flash": math.inf, "cudnn": 9.0} and choice.winner == "cudnn"
    assert "flash unsupported" in str(choice)
    assert compare({"flash": missing}, clock_of({}), CPU, Axis()).winner is None


def choice_of(rank: int, world_size: int, seconds: list[dict[str, float]]) -> Choice:
    state = initialize_model_parallel()
    runs = {name: missing if seconds[rank][name] == math.inf else run for name, run in RUNS.items()}
    return compare(runs, clock_of(seconds[rank]), CPU, state.world)


@pytest.mark.parametrize(
    ("seconds", "winner"),
    [
        ([{"flash": 1.0, "cudnn": 2.0}, {"flash": 5.0, "cudnn": 3.0}], "cudnn"),
        ([{"flash": 1.0, "cudnn": 2.0}, {"flash": math.inf, "cudnn": 3.0}], "cudnn"),
    ],
)
def test_ranks_agree_on_what_the_slowest_has(seconds: list[dict[str, float]], winner: str) -> None:
    first, second = run_world(2, choice_of, seconds)
    assert first == second and first.winner == winner


def test_the_winner_is_what_torch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, bool] = {}
    for name in ("cudnn", "flash", "mem_efficient"):
        monkeypatch.setattr(
            torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: told.__setitem__(name, on)
        )
    taken = iter([2.0, 1.0, 1.0, 2.0])
    monkeypatch.setattr(sdpa, "device_clock", lambda run: next(taken))
    assert choose_kernel(SHAPE, CPU, Axis()).winner == "cudnn"
    assert told == {"cudnn": True, "flash": False, "mem_efficient": False}
    assert choose_kernel(SHAPE, CPU, Axis()).winner == "flash"
    assert told == {"cudnn": False, "flash": True, "mem_efficient": True}
    monkeypatch.setattr(sdpa, "device_clock", lambda run: missing())
    told.clear()
    assert choose_kernel(SHAPE, CPU, Axis()).winner is None and not told


def test_what_is_timed_runs() -> None:
    gradients = attention_run(SHAPE, CPU, SDPBackend.MATH)()
    assert [tuple(x.shape) for x in gradients] == [(2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)]  # type: ignore[attr-defined]
    assert list(BACKENDS) == ["flash", "cudnn"]


BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 64 --lr 1 --mock-data "
    "--train-iters 1 --micro-batch-size 3 --bf16"
)


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        ("--attention-dropout 0", AttentionShape(32, 3, 8, 8, 8, 8, torch.bfloat16)),
        (
            "--attention-dropout 0 --tp 2 --group-query-attention --num-query-groups 4",
            AttentionShape(32, 3, 4, 2, 8, 8, torch.bfloat16),
        ),
        ("--attention-dropout 0 --fp32", None),
        ("", None),
        ("--attention-dropout 0 --cp 2", None),
        ("--attention-dropout 0 --window-size 8", None),
        ("--attention-dropout 0 --position-embedding-type alibi", None),
        ("--attention-dropout 0 --deterministic-mode", None),
    ],
)
def test_shapes(flags: str, shape: AttentionShape | None) -> None:
    """None where torch's attention is not what runs, or nothing is to depend on measurements."""
    argv = BASE.replace("--bf16", "") if "--fp32" in flags else BASE
    assert attention_shape(resolve(parse_args([*argv.split(), *flags.split()]), 2)) == shape
