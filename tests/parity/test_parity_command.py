"""Test that `python -m megatron.testing.parity` passes if the model is correct, and names the fault if the model is
wrong. Errors of the runs are not hidden."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.optimizer.owned_tensors import with_main_weights
from megatron.core.transformer import mlp
from megatron.testing.layout_matrix import compared, error_line
from megatron.testing.parity import main
from megatron.testing.parity_plan import Row
from megatron.testing.parity_rows import possible_names
from megatron.testing.snapshot import Snapshot
from megatron.training.extensions import CALLBACKS
from megatron.training.hooks import Callback, RunView
from tests.apart import python_apart

MOE = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --num-layers 2".split()


class Scaled(torch.autograd.Function):
    """Autograd function that returns its input, and multiplies the gradient by a factor in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * grad, None


def plant(monkeypatch: pytest.MonkeyPatch, only_under_tp: bool) -> None:
    """Plant a bug that scales the gradient of the MLP input."""
    forward = mlp.MLP.forward

    def broken(self: mlp.MLP, x: Tensor, *rest: Any) -> Tensor:
        wrong = self.linear_fc2.axis.size > 1 or not only_under_tp
        return forward(self, Scaled.apply(x, 1.01) if wrong else x, *rest)

    monkeypatch.setattr(mlp.MLP, "forward", broken)


def verdicts(out: str) -> dict[str, str]:
    """Return the verdicts of the printed table, keyed by row name. A verdict is the text after the number of ranks."""
    rows = [line.split(maxsplit=2) for line in out.splitlines() if line.split()[1:2] and line.split()[1].isdigit()]
    return {name: rest for name, _, rest in rows}


def test_a_correct_model_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    layouts = "tp2-sp cp2-ring finite-differences".split()
    assert main(["--layouts", *layouts, "--json", str(path), "--", "--num-layers", "2", "--bf16"]) == 0
    out = capsys.readouterr().out
    assert "not used here: --bf16" in out and "3 rows: 3 equal" in out
    rows = {row["name"]: row for row in json.loads(path.read_text())}
    assert [row["verdict"] for row in rows.values()] == ["trained"] + 3 * ["equal"]
    assert max(rows["tp2-sp"]["difference"], rows["cp2-ring"]["difference"]) < 1e-9


def test_refused_layouts_are_shown_with_their_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--layouts", "tp2", "ep2-alltoall", "tp2-sp-pp2-ep2", "--max-ranks", "4", "--", *MOE]) == 0
    found = verdicts(capsys.readouterr().out)
    assert found["tp2"].startswith("refused") and "needs --sequence-parallel with TP" in found["tp2"]
    assert "--max-ranks 4: the layout needs 8 ranks" in found["tp2-sp-pp2-ep2"]
    assert found["ep2-alltoall"].startswith("equal")


@pytest.mark.parametrize(
    ("only_under_tp", "row", "equal"), [(True, "tp2", "pp2-1f1b"), (False, "finite-differences", "tp2")]
)
def test_a_wrong_gradient_is_named(
    only_under_tp: bool, row: str, equal: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Depending on `only_under_tp`, the planted gradient error occurs only under tensor parallelism or under every
    layout."""
    plant(monkeypatch, only_under_tp)
    assert main(["--layouts", row, equal, "--", "--num-layers", "2"]) == 1
    found = verdicts(capsys.readouterr().out)
    assert found[row].startswith("DIFFERS") and "gradient decoder.layers.1.pre_mlp_layernorm" in found[row]
    assert found[equal].startswith("equal")


class SumOfWeights(Callback):
    """Callback that sums the main weights over all steps. The sum is the same under every layout unless a bug is
    planted."""

    mistake = ""
    steps = 0

    def on_step_end(self, run: RunView) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.steps += 1 + rank if self.mistake == "number" else 1
        for total, weights in with_main_weights(run.optimizer, self.states):
            total.add_(weights, alpha=ranks if self.mistake == "tensor" else 1)

    def state(self) -> object:
        return {"steps": [self.steps]}

    def load_state(self, state: Any) -> None:
        self.steps = 0 if self.mistake == "load" else state["steps"][0]


@pytest.fixture
def sum_of_weights() -> Iterator[None]:
    CALLBACKS.register("sum of weights", SumOfWeights, states=("total",))
    yield
    del CALLBACKS._entries["sum of weights"]


RESHARDED = "dp2-to-tp2-sp-pp2-dp2"


@pytest.mark.usefixtures("sum_of_weights")
@pytest.mark.parametrize(
    ("mistake", "rows", "why"),
    [
        ("", ["dp2", RESHARDED], " 3 callbacks.sum_of_weights, 28 callbacks.sum_of_weights.total"),
        ("tensor", ["dp2"], "step 1 callbacks.sum_of_weights.total embedding"),
        ("number", ["dp2"], "step 1 callbacks.sum_of_weights state.steps.0: replicas differ"),
        ("load", [RESHARDED], "initial callbacks.sum_of_weights state.steps.0 (1 tensors"),
    ],
)
def test_a_wrong_state_of_a_callback_is_named(
    mistake: str, rows: list[str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(SumOfWeights, "mistake", mistake)
    assert main(["--layouts", *rows, "--", "--num-layers", "2"]) == (1 if mistake else 0)
    found = verdicts(capsys.readouterr().out)
    assert all(found[row].startswith("DIFFERS" if mistake else "equal") for row in rows)
    assert why in found[rows[-1]]


def test_a_crash_is_one_row_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = mlp.MLP.forward

    def broken(self: mlp.MLP, x: Tensor, *rest: Any) -> Tensor:
        if self.linear_fc2.axis.size > 1:
            raise ArithmeticError("no TP here")
        return forward(self, x, *rest)

    monkeypatch.setattr(mlp.MLP, "forward", broken)
    assert main(["--layouts", "tp2", "dp2", "--", "--num-layers", "2"]) == 1
    found = verdicts(capsys.readouterr().out)
    assert found["tp2"].startswith("CRASHED") and "ArithmeticError: no TP here (" in found["tp2"]
    assert f"{Path(__file__).name}:" in found["tp2"] and "in broken)" in found["tp2"]
    assert found["dp2"].startswith("equal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layouts", "pp2"], "no such row; did you mean pp2-1f1b or pp2-interleaved"),
        (["--layouts", "none"], "--layouts none: no such row; --list prints all rows with their flags"),
        (["--layouts", "tp2-spp"], "--layouts tp2-spp: no such row; did you mean tp2-sp? --list prints"),
        (["--", "--num-attention-heads", "5"], "--hidden-size 32: must be a multiple of --num-attention-heads 5"),
        (["--", "--train-iters", "1"], "--train-iters 1: is less than --steps 2"),
        (["--", "--no-such-flag"], "--no-such-flag: unknown flag"),
    ],
)
def test_bad_flags_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [(), ("--pipeline-schedule", "mine")])
def test_wrong_rows_are_refused_without_torch(flags: tuple[str, ...]) -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom megatron.testing.parity import main; sys.exit(main())"
    python_apart("-c", script, "--layouts", "pp2", "--", *flags, code=2)


def test_rows_of_a_given_schedule_are_known() -> None:
    assert "pp2-mine" in (possible_names(["--pipeline-schedule=mine"]) or [])
    assert "pp2-mine" not in (possible_names([]) or []) and possible_names(["--config", "mine.yaml"]) is None


def test_the_list_needs_no_torch() -> None:
    code = "import sys; from megatron.testing.parity import main; main(['--list']); print('torch' in sys.modules)"
    assert python_apart("-c", code, code=0).stdout.endswith("\nFalse\n")


def test_the_list_shows_flags_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list", "--", *MOE, "--tp", "2"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "refused: --num-experts 4: needs --sequence-parallel with TP" in lines["given"]
    assert "--pp 2 --pipeline-schedule zb-v" in lines["pp2-zb-v"] and "trained" not in lines


def test_the_error_of_the_first_rank_counts() -> None:
    text = (
        'rank 1 of 2:\nTraceback (most recent call last):\n  File "/a/megatron/x.py", line 3, in f\n    g()\n'
        '  File "/home/mine.py", line 7, in g\n    1 / 0\nZeroDivisionError: division by zero\n\n'
        'rank 0 of 2:\nTraceback (most recent call last):\n  File "/b.py", line 1, in h\nRuntimeError: peer is gone\n'
    )
    assert error_line(text) == "ZeroDivisionError: division by zero (/home/mine.py:7 in g)"


def test_elements_changed_only_by_rounding_are_compared_separately() -> None:
    """With Adam, rounding may reverse the sign of a gradient of 1e-17, and with it the direction of the weight update.
    A gradient of exactly 0 must leave the weight unchanged."""

    def snapshot(tiny: float, moved: float) -> Snapshot:
        values = {"initial weight w": [0.0, 0.0], "step 1 gradient w": [1.0, tiny], "step 1 weight w": [-0.1, moved]}
        return Snapshot({key: torch.tensor(value, dtype=torch.float64) for key, value in values.items()})

    row = compared(Row("tp2", 2), snapshot(1e-17, -0.1), snapshot(-1e-17, 0.1))
    assert row.verdict == "equal" and row.difference is not None and row.difference < 1e-9
    assert row.why == "apart from 1 elements of w, whose gradient is zero but for rounding"
    assert compared(Row("tp2", 2), snapshot(0.0, -0.1), snapshot(0.0, 0.1)).failed
    assert compared(Row("tp2", 2), snapshot(1e-3, -0.1), snapshot(1e-3, 0.1)).failed
