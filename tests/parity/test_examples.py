"""Every example of examples/: trained at layouts beside one process by the command that its readers would use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

EXAMPLES = {
    "ademamix.py": "--optimizer ademamix",
    "cyclic_wsd.py": "--lr-decay-style cyclic-wsd --lr-warmup-iters 1 --train-iters 3",
    "eager_1f1b.py": "--pipeline-schedule eager-1f1b",
    "goldfish_loss.py": "--loss-func goldfish --goldfish-context 3",
    "sandwich_norm.py": "--layer-module sandwich --normalization RMSNorm",
    "xielu.py": "--activation-func xielu",
}
"""Example -> the flags that choose what it registers."""

PART = ["dp2", "tp2-sp-pp2-cp2", "dp2-to-tp2-sp-pp2-dp2"]
"""Rows of the default run, on two layers; those of --whole are all, on four."""

DIFFERENTIABLE = ["goldfish_loss.py", "sandwich_norm.py", "xielu.py"]
"""Examples with gradients of their own, which are compared with finite differences too."""


def parity(extension: Path, flags: str, rows: list[str], folder: Path) -> tuple[int, dict[str, dict[str, object]]]:
    """Exit code and rows of the command. Rows that only this example has are asked for too."""
    path = folder / "rows.json"
    command = [sys.executable, "-m", "megatron.testing.parity", "--extension", str(extension), "--json", str(path)]
    chosen = ["--layouts", *rows] if rows else []
    words = [*command, *chosen, "--", *flags.split()]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, {row["name"]: row for row in json.loads(path.read_text())}


def test_every_example_is_tested() -> None:
    there = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert there == EXAMPLES.keys() | {"early_stopping.py", "token_accuracy.py", "streaming_dataset.py"}


@pytest.mark.grid("rows", [PART], [PART, []])
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_computes_the_same_at_every_layout(name: str, rows: list[str], tmp_path: Path) -> None:
    own = ["tp2-sp-pp2-dp2-eager-1f1b"] if name == "eager_1f1b.py" and rows else []
    own += ["finite-differences"] if name in DIFFERENTIABLE and rows else []
    flags = EXAMPLES[name] + (" --num-layers 2" if rows else "")
    code, found = parity(ROOT / "examples" / name, flags, rows + own, tmp_path)
    assert code == 0, found
    equal = [row for row in found.values() if row["verdict"] == "equal"]
    assert len(equal) == len(rows) + len(own) if rows else len(equal) > 15


def test_planted_wrong_gradient_is_named(tmp_path: Path) -> None:
    """The sum over tensor-parallel ranks forgotten, as is easily done."""
    text = (ROOT / "examples" / "xielu.py").read_text()
    wrong = text.replace(', partial_over=("tp",)', "")
    assert wrong != text
    (tmp_path / "wrong_xielu.py").write_text(wrong)
    flags = "--activation-func xielu --num-layers 2"
    code, found = parity(tmp_path / "wrong_xielu.py", flags, ["tp2-sp", "pp2-1f1b"], tmp_path)
    assert code == 1
    assert (found["tp2-sp"]["verdict"], found["pp2-1f1b"]["verdict"]) == ("differs", "equal")
    assert ".mlp.activation.alpha" in str(found["tp2-sp"]["why"])
