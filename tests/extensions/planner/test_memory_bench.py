"""What training takes on each rank is what the dry run plans: a small piece of tools/bench/memory.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.extensions.planner.live_memory import LiveMemory
from tests.extensions import installed
from tests.harness import run_world
from tools.bench.memory import LAYOUTS, Row, config_of, layer_bytes, main, rows_of

SIZES = {"layers": 4, "hidden": 64, "seq": 64, "vocab": 512}


def rows(layout: str) -> list[Row]:
    return rows_of(layout, SIZES)


@pytest.mark.parametrize(
    "layout",
    [
        *("1 process", "full", "llama fp8 PP 2 zb-h1", "DP 2 ZeRO-2 offload", "PP 2 DP 2 ZeRO-3"),
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
    """In units of sbh, and in bytes per token. The published formula (arXiv 2205.05198, table 2) has
    scores of attention too, 5as/h in units of sbh, and no statistics of norms."""
    world_size, flags = LAYOUTS[layout]
    found = layer_bytes(config_of(flags, world_size, SIZES))
    assert found == sbh * SIZES["seq"] * SIZES["hidden"] + tokens * SIZES["seq"]


def loss_memory(rank: int, world_size: int, tokens: int, vocab: int) -> tuple[int, int, int]:
    """Of forward and backward of the loss over bf16 logits [tokens, 1, vocab / tp] that an operation has made: bytes of
    its largest fp32 tensor, the most beside the logits, and of logits in fp32."""
    state = initialize_model_parallel(world_size) if world_size > 1 else ParallelState()
    columns = vocab // world_size
    made_from = torch.randn(tokens, 1, columns, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(vocab, (tokens, 1))
    with LiveMemory() as live:
        logits = made_from * 1.0
        live.restart_peak()
        before = live.now
        loss = vocab_parallel_cross_entropy(logits, labels, state.tp, vocab)
        torch.autograd.grad(loss.sum(), logits)
        return live.largest_fp32, live.peak - before, 4 * tokens * columns


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_are_never_whole_in_fp32(tp: int) -> None:
    for largest, extra, whole in run_world(tp, loss_memory, 512, 50304):
        assert largest <= extra < whole / 10


def test_table_of_tensor_parallel_ranks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "--hidden 64 --seq 64 --vocab 512 --only".split()
    assert main([*flags, "TP 2 SP selective", "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert len([line for line in out.splitlines() if line.startswith("TP 2 SP selective ") and " equal " in line]) == 2
    assert len(json.loads((tmp_path / "found.json").read_text())["rows"]) == 2
