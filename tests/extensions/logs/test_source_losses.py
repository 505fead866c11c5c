"""Test that, with --log-source-loss, the logged training and evaluation losses of each dataset in a blend equal the
mean loss over the tokens of this dataset."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.training.progress import Step
from megatron.training.run import TrainingRun
from tests.corpus import write_documents
from tests.gpt_cases import token_losses
from tests.harness import run_world, train_to_the_end

MODEL = (
    "--cpu --fp64 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --lr 1e-2 "
    "--make-vocab-size-divisible-by 8 --global-batch-size 8 --train-iters 3 --eval-iters 2 --eval-interval 3 "
    "--split 7,3,0 --log-interval 1 --iterations-to-skip 2 --max-skipped-iterations 1 --log-source-loss --num-workers 0"
).split()


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    one, two = (
        write_documents(tmp_path / name, (low + np.arange(n % 7, n % 7 + 12) for n in range(40)))
        for name, low in (("one", 0), ("two", 25))
    )
    return ["--data-path", "3", one, "1", two]


def records(rank: int, world_size: int, argv: list[str], folder: Path) -> tuple[list[dict], dict[str, float]]:
    """Return two values: the log of a run, and the loss of each source in the first step. The losses of the sources are
    computed from the token losses of a one-process run."""
    expected: dict[str, float] = {}

    def look(run: TrainingRun) -> None:
        rows = {0: [0.0, 0.0], 1: [0.0, 0.0]}
        run.stages[0].eval()
        for batch in run.data.read_batches(Step(1, 0, 8)):
            with torch.no_grad():
                losses = token_losses(run.stages[0], batch)
            sources = (batch.tokens[:, 0] >= 25).long().tolist()
            for number, loss, mask in zip(sources, losses, batch.loss_mask, strict=True):
                rows[number][0] += float((loss * mask).sum())
                rows[number][1] += float(mask.sum())
        run.stages[0].train()
        expected.update({name: rows[number][0] / rows[number][1] for number, name in enumerate(("one", "two"))})

    argv = [*argv, "--metrics-file", str(folder / "metrics.jsonl")]
    train_to_the_end(rank, world_size, argv, *([look] if world_size == 1 else []))
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if rank == 0 else []
    return found, expected


def test_source_losses_match_their_tokens_under_every_layout(tmp_path: Path, data: list[str]) -> None:
    flags = "--hidden-dropout 0 --attention-dropout 0"
    ((alone, expected),) = run_world(1, records, [*MODEL, *data, *flags.split()], tmp_path)
    assert {name: alone[0][f"source_{name}_loss"] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert alone[1]["source_one_loss"] is None, "the skipped step"
    (evaluated,) = (record for record in alone if "valid_loss" in record)
    assert min(evaluated["valid_source_one_loss"], evaluated["valid_source_two_loss"]) < evaluated["valid_loss"]
    (tmp_path / "layout").mkdir()
    argv = [*MODEL, *data, *flags.split(), "--pp", "2", "--cp", "2", "--micro-batch-size", "2"]
    for one, other in zip(run_world(4, records, argv, tmp_path / "layout")[0][0], alone, strict=True):
        measured = {key: value for key, value in other.items() if key.endswith("loss") and value is not None}
        assert {key: one[key] for key in measured} == pytest.approx(measured, rel=1e-9)
        assert one.keys() == other.keys()
