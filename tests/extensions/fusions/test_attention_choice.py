"""Test that a run uses the fastest attention kernel, which is the same on all ranks. The tests use simulated clocks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.parallel_state import Axis, ParallelState, initialize_model_parallel
from megatron.extensions.speed.fusions.attention import choice as sdpa
from megatron.extensions.speed.fusions.attention.choice import (
    BACKENDS,
    WITH_DROPOUT,
    AttentionShape,
    Choice,
    attention_run,
    attention_shape,
    choose_attention,
    choose_kernel,
    compare,
)
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve
from megatron.training.initialize import Runtime
from megatron.training.reliability.launch import Launch
from tests.harness import run_world

CPU = torch.device("cpu")
SHAPE = AttentionShape(16, 2, 4, 2, 8, 8, torch.float32)


class Operands:
    """Placeholder for the operand tensors that a timed kernel keeps in memory."""


def missing() -> None:
    raise RuntimeError("No available kernel. Aborting execution.")


def clock_of(seconds: dict[str, float]) -> Callable[[Callable[[], object]], float]:
    """Return a simulated clock. The clock calls the function that is timed, which returns its own name, and returns the
    entry of `seconds` for this name."""
    return lambda run: seconds[str(run())]


RUNS = {"flash": lambda: "flash", "cudnn": lambda: "cudnn"}


def test_a_missing_kernel_is_not_chosen() -> None:
    choice = compare({**RUNS, "flash": missing}, clock_of({"cudnn": 9.0}), CPU, Axis())
    assert choice.seconds == {"flash": math.inf, "cudnn": 9.0} and choice.winner == "cudnn"
    assert "flash unavailable" in choice.times and "cudnn 9000.00 ms" in choice.times
    assert compare({"flash": missing}, clock_of({}), CPU, Axis()).winner is None


def test_only_one_kernel_has_operands_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = weakref.WeakSet[Operands](), list[int]()

    def made(shape: AttentionShape, device: torch.device, name: str) -> Callable[[], object]:
        operands = Operands()
        alive.add(operands)
        most.append(len(alive))
        return lambda: operands

    def clock(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(sdpa, "attention_run", made)
    compare({name: sdpa._lazily(SHAPE, CPU, name) for name in BACKENDS}, clock, CPU, Axis())
    assert most == [1] * len(BACKENDS)


def choice_of(rank: int, world_size: int, seconds: list[dict[str, float]]) -> Choice:
    state = initialize_model_parallel()
    runs = {name: missing if seconds[rank][name] == math.inf else run for name, run in RUNS.items()}
    return compare(runs, clock_of(seconds[rank]), CPU, state.world)


@pytest.mark.parametrize("flash", [5.0, math.inf])
def test_ranks_agree_on_the_kernel_that_suits_the_slowest(flash: float) -> None:
    first, second = run_world(2, choice_of, [{"flash": 1.0, "cudnn": 2.0}, {"flash": flash, "cudnn": 3.0}])
    assert first == second and first.winner == "cudnn"


def test_torch_is_set_to_the_fastest_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, bool] = {}
    for name in ("cudnn", "flash", "mem_efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: told.__setitem__(name, on))
    taken = iter([2.0, 3.0, 1.0, 1.0, 3.0, 2.0, 3.0, 1.0, 2.0])  # flash, flash3, cudnn
    monkeypatch.setattr(sdpa, "device_clock", lambda run: next(taken))
    assert choose_kernel(SHAPE, CPU, Axis()).winner == "cudnn"
    assert told == {"cudnn": True, "flash": False, "mem_efficient": False}
    assert choose_kernel(SHAPE, CPU, Axis()).winner == "flash"
    assert told == {"cudnn": False, "flash": True, "mem_efficient": True}
    told.clear()
    assert choose_kernel(SHAPE, CPU, Axis()).winner == "flash3" and not told
    monkeypatch.setattr(sdpa, "device_clock", lambda run: missing())
    assert choose_kernel(SHAPE, CPU, Axis()).winner is None and not told


def test_only_the_requested_kernel_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "use", lambda winner: None)
    monkeypatch.setattr(sdpa, "device_clock", lambda run: 1.0)
    assert choose_kernel(SHAPE, CPU, Axis(), "cudnn").seconds == {"cudnn": 1.0}
    monkeypatch.setattr(sdpa, "device_clock", lambda run: missing())
    with pytest.raises(ValueError, match=r"--attention-backend flash3: on at least one rank, this kernel is not"):
        choose_kernel(SHAPE, CPU, Axis(), "flash3")


TIMED = [
    (SHAPE, 16),
    (replace(SHAPE, tiles=True, window=5), 16),
    (replace(SHAPE, tiles=True, queries=(range(4), range(12, 16))), 8),
    (replace(SHAPE, dropout=0.1), 16),
]


@pytest.mark.parametrize(("shape", "rows"), TIMED, ids=["whole", "window", "context", "dropout"])
def test_every_timed_kernel_runs(shape: AttentionShape, rows: int) -> None:
    """On the CPU, CPU kernels run in place of the GPU kernels."""
    gradients = attention_run(shape, CPU, "unfused")()
    assert [tuple(x.shape) for x in gradients] == [(rows, 2, 4, 8), (16, 2, 2, 8), (16, 2, 2, 8)]  # type: ignore[attr-defined]
    varlen = shape.window is not None
    assert shape.backends == ((WITH_DROPOUT,) if shape.dropout else ("flash", "flash3") if varlen else BACKENDS)


def test_a_cpu_offers_no_gpu_kernels() -> None:
    runtime = Runtime(Launch(), CPU, ParallelState())
    assert choose_attention(config_of("--attention-backend flash"), runtime) == "flash"
    assert choose_attention(config_of(""), runtime) == "auto"
    assert choose_attention(config_of("--attention-backend fused"), runtime) == "auto"
    assert config_of("--attention-backend local").parallel.attention_backend == "unfused"


def config_of(flags: str) -> RunConfig:
    return resolve(parse_args([*BASE.split(), *flags.split()]), 1)


BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 64 --lr 1 --mock-data "
    "--train-iters 1 --micro-batch-size 3 --bf16"
)
OF_BASE = AttentionShape(32, 3, 8, 8, 8, 8, torch.bfloat16)
NONE = "--attention-dropout 0"
FIRST_OF_TWO = (range(0, 8), range(24, 32))
SHAPES: dict[str, dict[str, Any] | None] = {
    NONE: {},
    f"{NONE} --tp 2 --group-query-attention --num-query-groups 4": {"heads": 4, "groups": 2},
    "": {"dropout": 0.1},
    "--deterministic-mode": {"dropout": 0.1},
    f"{NONE} --cp 2": {"queries": FIRST_OF_TWO, "tiles": True},
    f"{NONE} --cp 2 --cp-comm-type a2a": {"heads": 4, "groups": 4, "tiles": True},
    f"{NONE} --cp 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2": {
        "heads": 4,
        "groups": 4,
        "queries": FIRST_OF_TWO,
        "tiles": True,
    },
    f"{NONE} --window-size 8": {"window": 8, "tiles": True},
    f"{NONE} --reset-attention-mask --tokenizer-type NullTokenizer": {"documents": True, "tiles": True},
    f"{NONE} --deterministic-mode --attention-backend flash": {},
    f"{NONE} --fp32": None,
    f"{NONE} --position-embedding-type alibi": None,
    f"{NONE} --attn-logit-softcapping 50": None,
    f"{NONE} --deterministic-mode": None,
}
"""Fields of the expected attention shape that differ from `OF_BASE`, keyed by the flags that change them. The value is
None if the run does not use torch's attention, or if measurements must not influence the choice of the kernel."""


@pytest.mark.parametrize("flags", SHAPES)
def test_the_timed_shape_follows_from_the_flags(flags: str) -> None:
    argv = BASE.replace("--bf16", "") if "--fp32" in flags else BASE
    changes = SHAPES[flags]
    expected = None if changes is None else replace(OF_BASE, **changes)
    assert attention_shape(resolve(parse_args([*argv.split(), *flags.split()]), 2)) == expected
