"""If a run with packed documents and balanced work is killed and resumed, its results are bitwise equal to those of an
uninterrupted run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import torch

from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.parallel_state import Axis
from megatron.training.checkpoints.loading import choose_checkpoint
from tests.apart import read_records
from tests.extensions.packing.test_packed_data import MODEL, corpus
from tests.faults.test_kills import assert_resumed, reaches
from tests.forked import forked_ranks, run_forked

FLAGS = f"{MODEL} --cp 2 --balance-packed-samples --hybrid-context-parallel --train-iters 8 --save-interval 2"

LOGGED = ("iteration", "lm_loss", "grad_norm", "work_imbalance", "context_imbalance", "context_keys_sent")


def test_a_killed_run_continues_bitwise(tmp_path: Path) -> None:
    prefix = corpus(tmp_path / "x", np.random.default_rng(2).integers(1, 24, 90).tolist())
    save, alone, screen = (tmp_path / name for name in ("save", "alone", "screen"))

    def flags(place: Path) -> list[str]:
        files = f"--save {place} --load {place} --log-interval 1 --sample-log {place / 'samples.jsonl'}"
        return f"{FLAGS} --data-path {prefix} {files}".split()

    with forked_ranks(4, flags(save), screen) as processes:
        assert reaches(5, 0.5, processes, screen)
        os.kill(processes[1].pid, signal.SIGKILL)
    latest = read_latest(save) or 0
    assert 2 <= latest < 8  # the save of iteration 4 may still be in progress, but that of iteration 2 is complete
    run_forked(4, flags(save), screen)
    assert_resumed(screen.read_text(), latest)
    run_forked(4, flags(alone), screen)
    found, expected = (
        [[record[name] for name in LOGGED] for record in read_records(place / "metrics.jsonl")]
        for place in (save, alone)
    )
    assert found == expected and len(found) == 8
    assert (save / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    one, other = (choose_checkpoint(place, Axis()) for place in (save, alone))
    assert one is not None and other is not None and one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(one.read(key), other.read(key)) for key in other.tensors)
