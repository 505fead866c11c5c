"""Training runs whose data contains one document that causes a loss spike."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.parallel_state import Axis
from megatron.training.checkpoints.loading import choose_checkpoint
from tests.corpus import write_documents
from tests.forked import run_forked
from tests.tiny import TINY

STEPS, DOCUMENTS = 20, 100
MODEL = (
    f"{TINY.replace('--mock-data ', '')} --log-interval 1 --hidden-dropout 0.1 --train-iters {STEPS} "
    "--check-for-spiky-loss --spiky-loss-factor 1.2 --lr 3e-2 --lr-decay-style constant --split 100,0,0"
).split()
AT = 90
"""Index of the document that causes the spike."""


def poisoned(folder: Path) -> str:
    """Write one document of random tokens that occur in no other document. All other documents consist of ascending
    numbers. Return the prefix of the dataset."""
    noise = np.random.default_rng(1).integers(20, 50, 18)
    documents = [noise if number == AT else np.arange(9) for number in range(DOCUMENTS)]
    return write_documents(folder / "data", documents)


class Run:
    """Training run with its own --save folder."""

    def __init__(self, folder: Path, data: str, flags: str = "", ranks: int = 1) -> None:
        self.save, self.ranks = folder / "save", ranks
        folder.mkdir(parents=True)
        self.screen = folder / "screen"
        self.flags = [*MODEL, "--data-path", data, "--save", str(self.save), "--load", str(self.save), *flags.split()]

    def start(self, flags: str = "", ranks: int | None = None, code: int = 0) -> str:
        """Start the run, wait until its processes exit, and return the printed output."""
        return run_forked(ranks or self.ranks, [*self.flags, *flags.split()], self.screen, code)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the run's events whose name is `name`."""
        lines = (self.save / "run_events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def losses(self) -> dict[int, tuple[float, float]]:
        """Return (loss, gradient norm) for each step, keyed by iteration. Assert that there is one record per
        iteration, in order."""
        records = [json.loads(line) for line in (self.save / "metrics.jsonl").read_text().splitlines()]
        assert [each["iteration"] for each in records] == list(range(1, len(records) + 1))
        return {each["iteration"]: (each["lm_loss"], each["grad_norm"]) for each in records}

    def assert_equal(self, other: Run, ignored: Sequence[str] = ()) -> None:
        """Assert that losses and final checkpoints are bitwise equal to those of another run."""
        assert self.losses() == other.losses()
        one, two = (choose_checkpoint(run.save, Axis()) for run in (self, other))
        assert one is not None and two is not None and one.tensors.keys() == two.tensors.keys()
        for key in one.tensors:
            assert one.read(key).equal(two.read(key)), key
        for name in ("iteration", "consumed_samples", "scheduled_samples", "optimizer", "skipped_iterations"):
            assert one.payload[name] == two.payload[name], name
