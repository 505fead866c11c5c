"""Runs that include a phase change are killed near the change, resumed under another layout, and compared with one
process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.corpus import write_documents
from tests.faults.test_kills import check_kills
from tests.forked import run_forked
from tests.tiny import TINY

CHANGES = {
    **{1: [4] + [8] * 3 + [4] * 6, 16: [4] * 4 + [8] * 3 + [4] * 3, 17: [4] * 5 + [8] * 3 + [4] * 2},
    24: [4] * 6 + [8] * 3 + [4],
}
"""Batch sizes of a run whose second phase has 8 samples per step, keyed by the first sample of the second phase."""


@pytest.mark.grid("change", [17], CHANGES)
def test_runs_killed_around_a_change_of_phase_take_each_sample_once(change: int, tmp_path: Path) -> None:
    """All phases use the data source `web`. The last phase does not use the data source `code`. The phases change the
    blend, sequence length, rotary base, batch size and learning rate. The sequence length finally returns to its
    initial value. The sample log equals that of a one-process run byte for byte."""
    random = np.random.default_rng(1)
    texts = ((random.integers(0, 64, int(random.integers(5, 60))) for _ in range(120)) for _ in range(2))
    web, code = (write_documents(tmp_path / name, text) for name, text in zip(("web", "code"), texts, strict=True))
    phases = tmp_path / "phases.yaml"
    phases.write_text(
        f"- {{name: main, data-path: 3 {web} 1 {code}}}\n"
        f"- {{name: long, from-samples: {change}, data-path: 1 {web} 1 {code}, seq-length: 32, rotary-base: 5e5, "
        "global-batch-size: 8, lr: 5e-3, lr-decay-style: cosine, lr-warmup-iters: 1}\n"
        f"- {{name: end, from-samples: {change + 24}, data-path: {web}, lr: 1e-3, lr-decay-style: linear}}\n"
    )
    data = ["--data-phases", str(phases), "--split", "1,0,0", "--log-source-loss"]
    check_kills(tmp_path, (10, 4, 2), data, ["source_web_loss", "source_code_loss"])
    log = [json.loads(line) for line in (tmp_path / "alone" / "samples.jsonl").read_text().splitlines()]
    samples, origins = [record["samples"] for record in log], [each for record in log for each in record["origins"]]
    assert [last - first + 1 for first, last in samples] == CHANGES[change]
    assert len(set(origins)) == len(origins) == sum(CHANGES[change])


def test_validation_uses_the_data_of_its_phase(tmp_path: Path) -> None:
    """An evaluation of a checkpoint from the beginning of a phase uses the data of that phase."""
    phases = tmp_path / "phases.yaml"
    phases.write_text("- {name: short, seq-length: 8}\n- {name: long, from-iterations: 2, seq-length: 16}\n")
    flags = f"{TINY} --position-embedding-type rope --data-phases {phases} --log-interval 1 --eval-iters 2 --pp 2"
    flags += f" --eval-interval 4 --split 8,1,1 --load {tmp_path / 'trained'}"
    found = []
    for name, more in (("trained", []), ("alone", ["--skip-train"])):
        run_forked(2, [*flags.split(), "--save", str(tmp_path / name), *more], tmp_path / "screen")
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        found.append({key: value for line in lines for key, value in json.loads(line).items() if "_loss" in key})
    trained, alone = found
    assert {"valid_loss", "test_loss"} <= alone.keys() and {key: trained[key] for key in alone} == alone
