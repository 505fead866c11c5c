"""Losses are sums and are divided once: however a batch with random loss masks is cut, there is one gradient."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np
import pytest

from megatron.core.datasets.gpt_dataset import Sample
from megatron.core.datasets.mock import MockGPTDataset
from megatron.testing.snapshot import Snapshot, first_difference, train_in_world

FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --vocab-size 40 "
    "--make-vocab-size-divisible-by 8 --lr 1e-2 --mock-data --global-batch-size 16 --train-iters 2 --eval-iters 0 "
    "--num-workers 0 --fp64 --cpu"
)


class Cut(NamedTuple):
    micro_batch: int
    dp: int
    cp: int
    pp: int

    @property
    def argv(self) -> list[str]:
        return f"{FLAGS} --micro-batch-size {self.micro_batch} --dp {self.dp} --cp {self.cp} --pp {self.pp}".split()


GRID = [Cut(*sizes) for sizes in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2))]
PART = [Cut(2, 1, 1, 1), Cut(4, 1, 1, 2), Cut(1, 2, 1, 1), Cut(4, 4, 1, 1), Cut(2, 1, 2, 1), Cut(2, 2, 2, 2)]

_plain = MockGPTDataset.__getitem__


def _masked(self: MockGPTDataset, index: int) -> Sample:
    """Masks of every density. All of samples 0 to 3 and 8, 9 counts for nothing: whole micro-batches, and a whole
    data-parallel rank where there are four; of sample 5 what one context-parallel rank of two holds."""
    random = np.random.default_rng(index)
    mask = (random.random(self.format.seq_length) < random.random()).astype(np.float32)
    if index % 16 in (0, 1, 2, 3, 8, 9):
        mask[:] = 0
    if index % 16 == 5:
        mask[:4] = mask[12:] = 0
    return {**_plain(self, index), "loss_mask": mask}


@pytest.fixture(scope="module")
def one_process() -> Snapshot:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MockGPTDataset, "__getitem__", _masked)
        return train_in_world(1, Cut(1, 1, 1, 1).argv)


@pytest.mark.grid("cut", PART, GRID)
def test_one_gradient_however_the_batch_is_cut(
    cut: Cut, one_process: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MockGPTDataset, "__getitem__", _masked)
    snapshot = train_in_world(cut.dp * cut.cp * cut.pp, cut.argv)
    assert not snapshot.replica_errors
    assert first_difference(one_process, snapshot, tolerance=1e-9) is None


def test_masks_matter(one_process: Snapshot) -> None:
    assert first_difference(one_process, train_in_world(1, Cut(1, 1, 1, 1).argv), tolerance=1e-3) is not None
