"""tools/compare_layouts.py reports no difference between correct layouts. If a bug is planted in one layout, the tool
names the layer that contains the bug."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.layers import LOCAL, TPContext
from megatron.core.transformer.layer import TransformerLayer
from tests.apart import ROOT
from tests.limits import wait_for
from tools.compare_layouts import main

MODEL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 8 --vocab-size 50 "
    "--make-vocab-size-divisible-by 4 --lr 1e-2"
).split()

PLANT = "PLANTED_BUG"


def compare(a: str, b: str, *flags: str, steps: int = 1) -> int:
    return main(["--a", a, "--b", b, "--steps", str(steps), "--", *MODEL, *flags])


@pytest.fixture(autouse=True)
def bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a bug in layer 2 if the layer is tensor-parallel. An environment variable selects the bug."""
    build = TransformerLayer.__init__

    def init(self: TransformerLayer, name: str, config: TransformerConfig, ctx: TPContext) -> None:
        build(self, name, config, ctx)
        fc2, norm = self.mlp.linear_fc2, self.pre_mlp_layernorm
        if ctx.layer != 2 or fc2.axis.size == 1:
            return
        match os.environ.get(PLANT):
            case "no all-reduce":
                fc2.boundary = LOCAL
            case "partial norm gradient":
                norm.weight.meta = replace(norm.weight.meta, partial_over=())
            case "error":
                self.mlp.activation = None  # type: ignore[assignment]

    monkeypatch.setattr(TransformerLayer, "__init__", init)


def test_layouts_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare("--tp 1", "--tp 2 --pp 2 --pipeline-schedule zb-v --sequence-parallel", steps=2) == 0
    out = capsys.readouterr().out
    assert "a: --tp 1: 2 steps on 1 rank in " in out
    assert "steps on 4 ranks in " in out
    assert "no difference in " in out


def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(PLANT, "no all-reduce")
    assert compare("", "--tp 2 --pp 2") == 1
    lines = capsys.readouterr().out.splitlines()
    assert "first difference: step 1 activation decoder.layers.2" in lines
    assert any(line.startswith("  a ") for line in lines) and any("elements differ" in line for line in lines)


def test_differing_replicas_are_detected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Both compared layouts contain the bug, so their results agree. The bug can be detected only by comparing the
    replicas within each layout."""
    monkeypatch.setenv(PLANT, "partial norm gradient")
    assert compare("--tp 2 --sequence-parallel", "--tp 2 --sequence-parallel") == 1
    out = capsys.readouterr().out
    assert "first difference: step 1 gradient decoder.layers.2.pre_mlp_layernorm.weight" in out
    assert "within a: replicas differ at (0,)" in out and "within b" in out


def test_an_error_is_not_a_difference(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(PLANT, "error")
    assert compare("", "--tp 2") == 3
    assert "'NoneType' object is not callable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("--tp 3", "", "--a: --num-attention-heads 4: must be a multiple of --tensor-model-parallel-size 3"),
        ("", "--tp 2 --world-size 3", "--world-size: does not apply here; use --world-b"),
        ("", "--pp 2 --pipeline-schedule zb", "--b: --pipeline-schedule zb: must be one of"),
        ("", "--swiglu", "give both one model"),
        ("", "--hidden-size 32", "initial weight embedding.word_embeddings.weight is (52, 16) in a and (52, 32) in b"),
        ("--train-iters 1", "--tp 2 --train-iters 0", "--b: --train-iters 0: must be above 0"),
        ("", '--tp "2', '--b --tp "2: cannot be split into flags'),
    ],
)
def test_bad_configurations_are_refused(a: str, b: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        compare(a, b)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "--steps 0: must be at least 1"),
        ("--steps 2", "--a: --train-iters 1: must be at least --steps 2"),
        ("--world-b 0 --tolerance -1", "--world-b 0: must be at least 1\n--tolerance -1.0: must be at least 0"),
    ],
)
def test_invalid_flags_of_the_tool_are_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--a", "", "--b", "--tp 2", *flags.split(), "--", *MODEL, "--train-iters", "1"])


def test_the_batch_and_the_ranks_suit_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--a", "--micro-batch-size 2", "--b", "", "--world-b", "3", "--steps", "1", "--", *MODEL]) == 0
    assert "1 step on 3 ranks in " in capsys.readouterr().out


def test_bf16_compares_only_tensors_that_rounding_leaves_comparable(capsys: pytest.CaptureFixture[str]) -> None:
    """The gradient of a key bias is zero up to rounding, but Adam turns this gradient into a full update. In 16 bits,
    the tool therefore compares only activations, losses, gradients and gradient norms of the first step."""
    assert compare("", "--tp 2 --pp 2 --sequence-parallel", "--bf16", steps=2) == 0
    out = capsys.readouterr().out
    assert "in 16 bits, only activation, loss, gradient, grad_norm of the first step are compared" in out


def test_ranks_end_with_their_parent_process() -> None:
    command = [sys.executable, str(ROOT / "tools/compare_layouts.py"), "--a", "", "--b", "--tp 2", "--steps", "100000"]
    with subprocess.Popen([*command, "--", *MODEL], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the tool prints its first line when it starts the run with the flags of --a
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        ranks = wait_for(lambda: children.read_text().split())
        process.kill()
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
