"""Test that, with --document-loss-log, the logged evaluation loss of each document equals the mean loss of the
document's tokens under every layout."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.training.data import put_on_device
from megatron.training.run import TrainingRun
from tests.corpus import write_documents
from tests.gpt_cases import token_losses
from tests.harness import run_world, train_to_the_end

MODEL = (
    "--cpu --fp64 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --lr 1e-30 "
    "--make-vocab-size-divisible-by 8 --global-batch-size 8 --train-iters 2 --eval-iters 2 --eval-interval 2 "
    "--split 5,5,0 --num-workers 0 --hidden-dropout 0 --attention-dropout 0"
).split()

Means = dict[tuple[str, int], tuple[int, float]]
"""Number of tokens and mean loss of each document, keyed by (source, document number)."""


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    """Write two data sources. Document n of each source repeats one token that identifies the document."""
    one, two = (
        write_documents(tmp_path / name, (np.full(3 + n % 5, low + n) for n in range(24)))
        for name, low in (("one", 0), ("two", 25))
    )
    return ["--data-path", "3", one, "1", two]


def losses(rank: int, world_size: int, argv: list[str], log: Path) -> tuple[list[dict], Means]:
    """Return the lines of the document log, and the same values computed from the token losses of a one-process run."""
    sums = defaultdict[tuple[str, int], list[float]](list)

    def look(run: TrainingRun) -> None:
        run.stages[0].eval()
        taken = run.data.valid[""].next_step(0, 16) if "" in run.data.valid else []
        for batch in put_on_device(taken, run.config.model, run.runtime):
            with torch.no_grad():
                of_tokens = token_losses(run.stages[0], batch)
            counted = batch.loss_mask.bool()
            for label, loss in zip(batch.labels[counted].tolist(), of_tokens[counted].tolist(), strict=True):
                sums["one" if label < 25 else "two", label % 25].append(loss)
        run.stages[0].train()

    train_to_the_end(rank, world_size, [*argv, "--document-loss-log", str(log)], *([look] if world_size == 1 else []))
    found = [json.loads(line) for line in log.read_text().splitlines()] if rank == 0 else []
    return found, {key: (len(each), sum(each) / len(each)) for key, each in sums.items()}


def means(lines: list[dict]) -> Means:
    return {(line["source"], line["document"]): (line["tokens"], line["loss"]) for line in lines}


def test_document_losses_match_their_tokens_under_every_layout(tmp_path: Path, data: list[str]) -> None:
    ((alone, expected),) = run_world(1, losses, [*MODEL, *data], tmp_path / "alone.jsonl")
    assert len(alone) == len(expected) > 15 and sum(line["tokens"] for line in alone) == 16 * 8
    assert all((line["iteration"], line["split"], line["set"]) == (2, "valid", "") for line in alone)
    assert [line["loss"] for line in alone] == sorted((line["loss"] for line in alone), reverse=True)
    found = means(alone)
    assert {key: tokens for key, (tokens, _) in found.items()} == {key: tokens for key, (tokens, _) in expected.items()}
    for key, (_, loss) in expected.items():
        assert found[key][1] == pytest.approx(loss, rel=1e-12), key
    for number, layout in enumerate(("--pp 2 --cp 2 --micro-batch-size 2", "--tp 2 --sequence-parallel")):
        log = tmp_path / f"{number}.jsonl"
        other = means(run_world(4, losses, [*MODEL, *data, *layout.split()], log)[0][0])
        assert other.keys() == found.keys()
        for key, (tokens, loss) in other.items():
            assert tokens == found[key][0] and loss == pytest.approx(found[key][1], rel=1e-12), (layout, key)


def test_documents_of_named_sets_are_logged(tmp_path: Path, data: list[str]) -> None:
    log = tmp_path / "log.jsonl"
    named = ["--data-path", data[2], "--valid", f"web={data[4]}", "--eval-interval", "1"]
    ((lines, _),) = run_world(1, losses, [*MODEL, *named, "--split", "1,0,0"], log)
    assert {(line["iteration"], line["set"], line["source"]) for line in lines} == {
        (1, "web", "two"),
        (2, "web", "two"),
    }
    (tmp_path / "mock").mkdir()
    ((lines, _),) = run_world(1, losses, [*MODEL, "--mock-data"], tmp_path / "mock/log.jsonl")
    assert [(line["split"], line["document"], line["tokens"]) for line in lines] == [
        ("valid", None, 128),
        ("test", None, 128),
    ]
