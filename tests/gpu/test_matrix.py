"""The parity matrix on a GPU: combinations of one rank, and of two that share the GPU over gloo, against one process on
the CPU, in fp64 and without dropout, of which each device draws other masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import pytest
import torch

from megatron.testing import local_run
from megatron.testing.snapshot import Snapshot, train_in_world
from megatron.training.config.run_config import RunConfig
from megatron.training.initialize import Runtime, local_runtime
from tests.parity.matrix import compared
from tests.parity.matrix.combination import Combination
from tests.parity.matrix.design import pairwise

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")


def on_the_gpu(config: RunConfig, rank: int, world_size: int) -> Runtime:
    torch.cuda.set_device(0)
    return replace(local_runtime(config, rank, world_size), device=torch.device("cuda", 0))


def train_on_the_gpu(world_size: int, argv: Sequence[str], steps: int, unseen: int) -> Snapshot:
    flags = [*(word for word in argv if word != "--cpu"), "--distributed-backend", "gloo"]
    with mock.patch.object(local_run, "local_runtime", on_the_gpu):
        return train_in_world(world_size, flags, steps, unseen=unseen)


@pytest.mark.parametrize("combination", [each for each in pairwise() if each.world_size <= 2], ids=str)
def test_combination_computes_what_the_cpu_does(combination: Combination) -> None:
    wrong, _ = compared(combination, NO_DROPOUT, train_on_the_gpu)
    assert wrong is None
