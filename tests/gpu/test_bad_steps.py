"""Tests of diverging runs and of slow ranks on a GPU. Each run is a separate process, as in
`tests.gpu.test_training`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.apart import python_apart
from tests.gpu.test_training import FLAGS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")


@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_a_diverging_run_is_searched_and_replayed(precision: str, tmp_path: Path) -> None:
    huge = [*FLAGS, precision, "--lr", "1e30", "--clip-grad", "0", "--save", str(tmp_path)]
    ended = python_apart("pretrain_gpt.py", *huge)
    assert ended.returncode == 1 and "is not finite (loss" in ended.stderr, ended.stderr
    (folder,) = (tmp_path / "nan").iterdir()
    assert json.loads((folder / "finding.json").read_text())["finding"] is not None, ended.stderr
    again = python_apart("tools/replay_step.py", str(folder))
    assert again.returncode == 0, again.stdout + again.stderr


def test_phases_are_timed_on_the_device(tmp_path: Path) -> None:
    ended = python_apart(
        "pretrain_gpt.py", *FLAGS, "--bf16", "--log-straggler", "--metrics-file", str(tmp_path / "metrics")
    )
    assert ended.returncode == 0, ended.stderr
    for line in (tmp_path / "metrics").read_text().splitlines():
        record = json.loads(line)
        phases = [record[f"straggler_{phase}_seconds"] for phase in ("forward", "backward", "optimizer")]
        assert min(phases) > 0
