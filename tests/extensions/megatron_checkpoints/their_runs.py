"""Helpers for the megatron-core checkpoints in tests/fixtures: unpack and convert the checkpoints, and continue runs
from the converted checkpoints."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron.core.batch import Batch
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.parallel_state import Axis
from megatron.training.checkpoints.checkpointing import load_whole_model
from megatron.training.checkpoints.loading import choose_checkpoint
from tests.forked import run_forked
from tools import convert_checkpoint
from tools.common import run_tool

FIXTURES = Path(__file__).parents[2] / "fixtures" / "megatron_checkpoints"

STORED = """
import json
from megatron.extensions.data.datasets.generator_dataset import stream_splits
from megatron.core.datasets.dataset import DATASETS

@DATASETS.register("stored")
def stored(config, format, seed, sizes):
    samples = sum(json.load(open({path!r}))["tokens"], [])
    return stream_splits(lambda split, first: iter(samples[first:]), format, sizes, "stored")
"""


def unpack(name: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


def of_their_run(name: str) -> Any:
    """Return the tokens [steps, batch, s + 1] and the losses [steps] of a megatron-core run, read from a fixture. The
    run saved a checkpoint after the second step."""
    return json.loads((FIXTURES / f"{name}.json").read_text())


def convert(*words: str | Path) -> None:
    assert convert_checkpoint.main([str(word) for word in words]) == 0


def opened(path: Path) -> Checkpoint:
    checkpoint = choose_checkpoint(path, Axis())
    assert checkpoint is not None
    return checkpoint


def loss_of(checkpoint: Path, tokens: list[list[int]]) -> float:
    model, _ = load_whole_model(checkpoint, number_format="fp32")
    data = torch.tensor(tokens)
    with torch.no_grad():
        logits = model.logits(None, Batch.of_tokens(data[:, :-1].contiguous()))
    return float(F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()))


def losses_of_a_run(name: str, start: Path, folder: Path, *flags: str) -> dict[int, float]:
    """Continue a converted checkpoint on two ranks up to step 4 with the original run's data, and return the losses by
    iteration."""
    (folder / "stored.py").write_text(STORED.format(path=str(FIXTURES / f"{name}.json")))
    words = ["--config", start / "run_config.yaml", "--load", start, "--save", folder / "run", "--train-iters", "4"]
    words += ["--extension", folder / "stored.py", "--dataset-type", "stored", *flags]
    words += "--cpu --eval-iters 0 --log-interval 1 --num-workers 0".split()
    run_forked(2, [str(word) for word in words], folder / "screen")
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


class Attack:
    """Object that creates a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.mkdir, ("executed",)  # type: ignore[return-value]


def refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Convert the checkpoint in a folder, assert that the conversion is refused and leaves no output, and return the
    error message."""
    with chdir(folder.parent), pytest.raises(SystemExit) as error:
        run_tool(lambda: convert_checkpoint.main(["--input", str(folder), "--output", "ours"]))
    assert error.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    return line
