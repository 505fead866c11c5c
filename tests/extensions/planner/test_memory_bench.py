"""What training takes on each rank is what the dry run plans: a small piece of tools/bench/memory.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.extensions import installed
from tests.harness import run_world
from tools.bench.memory import LAYOUTS, Row, config_of, layer_bytes, main, measure_loss, rows_of

SIZES = {"layers": 4, "hidden": 64, "seq": 64, "vocab": 512}


def rows(layout: str) -> list[Row]:
    return rows_of(layout, SIZES)


@pytest.mark.parametrize(
    "layout",
    [
        *("llama fp8 PP 2 zb-h1", "DP 2 ZeRO-2 offload", "PP 2 DP 2 ZeRO-3"),
        *("activations offload PP 2 zb-h1", "llama activations offload CP 2 ZeRO-3"),
    ],
)
def test_states_and_activations_are_the_plans(layout: str) -> None:
    """To the byte, but for peaks: what gloo's threads have sent they let go of a little later, more so on a busy
    machine."""
    for row in rows(layout):
        assert row.equal, row
        assert 0.5 * row.planned.peak < row.measured.peak < 1.5 * row.planned.peak, row


@pytest.mark.skipif(not installed("overlap"), reason="overlap is deleted")
def test_passes_in_turns_hold_what_is_planned() -> None:
    """Between actions, but for a scalar of each micro-batch; both passes' peaks may fall together."""
    for row in rows("experts EP 2 PP 2 interleaved in turns"):
        assert 0 <= row.measured.kept - row.planned.kept < 100
        assert 0.6 * row.planned.peak < row.measured.peak < 1.2 * row.planned.peak, row


def test_whole_units_of_experts_are_those_planned() -> None:
    for row in rows("experts EP 2 DP 4 ZeRO-3"):
        names = ("parameters", "gradients", "optimizer", "units")
        assert all(getattr(row.measured, name) == getattr(row.planned, name) for name in names), row
        assert 0 <= row.measured.kept - row.planned.kept < 100


@pytest.mark.parametrize(
    ("layout", "sbh", "tokens"),
    [
        # What each modules' recomputation drops: 5as/h never is there, 4a/h of it stays; norms keep 8 bytes a token.
        ("1 process", 34, 8 + 4 * 8),
        ("selective", 34, 8),
        ("layernorm", 30, 8 + 4 * 8),
        ("mlp_act", 26, 8 + 4 * 8),
        ("mlp", 18, 8 + 4 * 8),
        ("all modules", 14, 8),
        ("full", 2, 0),
        ("TP 2", 10 + 24 / 2, 8 + 4 * 8 / 2),
        ("TP 2 SP", 34 / 2, (8 + 4 * 8) / 2),
        ("TP 2 SP selective", 34 / 2, 8 / 2),
    ],
)
def test_every_byte_of_a_layer_is_accounted_for(layout: str, sbh: float, tokens: float) -> None:
    """In units of sbh, as the published formula has them, and in bytes per token."""
    world_size, flags = LAYOUTS[layout]
    found = layer_bytes(config_of(flags, world_size, SIZES))
    assert found == sbh * SIZES["seq"] * SIZES["hidden"] + tokens * SIZES["seq"]


def test_layers_are_below_the_published_formula() -> None:
    """34sbh and what is kept beside it, where the formula has 34sbh + 5as²b."""
    (plain,), (full,) = rows("1 process"), rows("full")
    assert plain.equal and full.equal
    assert plain.formula is not None and full.formula is not None
    assert plain.layers / plain.formula == pytest.approx((34 + 4 * 8 / 64 + 8 / 64) / (34 + 5 * 8 * 64 / 64))
    assert full.layers == full.formula


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_never_whole_in_fp32(tp: int) -> None:
    for loss in run_world(tp, measure_loss, 512, 50304):
        assert loss.largest_fp32 <= loss.extra < loss.whole_fp32 / 10


def test_table_of_tensor_parallel_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "--hidden 64 --seq 64 --vocab 512 --loss-tokens 64 --only".split()
    assert main([*flags, "TP 2 SP selective", "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("TP 2 SP selective ") and " equal " in line]) == 2
    assert len([line for line in out.splitlines() if line.startswith("loss, TP ")]) == 2
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 4
