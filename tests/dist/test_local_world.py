"""If a rank of a forked world is killed, the error message names this rank, even though only the other ranks can report
an error."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from tests.harness import run_world


def _lose_rank_one(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"^rank 1 of 2: ended by SIGKILL"):
        run_world(2, _lose_rank_one)
