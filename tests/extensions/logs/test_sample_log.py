"""Test that `--sample-log` lists the same samples in the same order under any layout, micro-batch size and number of
workers. tests/faults/test_kills.py compares the samples of a run that is killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.corpus import write_documents
from tests.extensions import installed
from tests.harness import run_world, train_to_the_end

pytestmark = pytest.mark.skipif(not installed("phases"), reason="phases is deleted")

MODEL = (
    "--cpu --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --lr 1e-2 "
    "--make-vocab-size-divisible-by 8 --global-batch-size 12 --rampup-batch-size 6 6 12 --train-samples 48 "
    "--eval-iters 0 --log-interval 1 --split 1,0,0"
).split()
DOCUMENTS = [list(range(n % 40, n % 40 + 3 + n % 9)) for n in range(60)]


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    one, two = (write_documents(tmp_path / name, map(np.array, DOCUMENTS)) for name in ("one", "two"))
    return ["--data-path", "3", one, "1", two]


def log_of(folder: Path, data: list[str], world_size: int, flags: str) -> Path:
    """Train, and return the path of the sample log. Checkpoints are saved to the same folder."""
    log = folder / "samples.jsonl"
    argv = [*MODEL, *data, "--sample-log", str(log), "--save", str(folder), *flags.split()]
    run_world(world_size, train_to_the_end, argv)
    return log


LAYOUTS = [
    (1, "--micro-batch-size 6 --num-workers 0"),
    (3, "--micro-batch-size 1 --num-workers 1"),
    (4, "--pp 2 --cp 2 --micro-batch-size 2 --num-workers 2"),
]


def test_every_layout_logs_the_same_samples(tmp_path: Path, data: list[str]) -> None:
    texts = []
    for number, (world_size, flags) in enumerate(LAYOUTS):
        texts.append(log_of(tmp_path / f"{number}", data, world_size, flags).read_bytes())
    assert all(text == texts[0] for text in texts)
    records = [json.loads(line) for line in texts[0].splitlines()]
    assert [record["samples"] for record in records] == [[0, 5], [6, 11], [12, 23], [24, 35], [36, 47]]
    assert [record["iteration"] for record in records] == [1, 2, 3, 4, 5]
    origins = [origin for record in records for origin in record["origins"]]
    assert len(origins) == 48 and {origin.split(":")[0] for origin in origins} == {"one", "two"}
    assert len(set(origins)) > 40, "samples begin in different places"
    assert all(len(record["crc32"]) == len(record["origins"]) for record in records)


def test_a_longer_run_continues_in_the_original_order(tmp_path: Path, data: list[str]) -> None:
    """The first run's 48 samples are less than one epoch of each data source, but the longer run's 240 samples are
    several epochs. If a run is extended to several epochs, Megatron-LM switches to a different order."""
    flags = "--micro-batch-size 3 --num-workers 0"
    begun = log_of(tmp_path / "run", data, 1, flags).read_text()
    resumed = f"--load {tmp_path / 'run'}"
    log_of(tmp_path / "run", data, 2, f"{flags} --tp 2 --train-samples 96 {resumed} --exit-interval 7")
    whole = log_of(tmp_path / "run", data, 1, f"{flags} --micro-batch-size 6 --train-samples 240 {resumed}").read_text()
    assert whole.startswith(begun)
    records = [json.loads(line) for line in whole.splitlines()]
    assert [record["samples"][0] for record in records] == [0, 6, *range(12, 240, 12)]
    for name in ("one", "two"):
        taken = [origin for record in records for origin in record["origins"] if origin.startswith(name)]
        epoch = (sum(map(len, DOCUMENTS)) - 1) // 8
        assert len(set(taken[:epoch])) == min(epoch, len(taken)), "an epoch takes each sample once"
