"""Run the parity matrix on a GPU. Some combinations use one rank. In the other combinations, several ranks share the
GPU and communicate over gloo or NCCL.

Each combination is compared with one process on the CPU. All runs use fp64. Dropout is disabled, because the CPU and
the GPU draw different dropout masks.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.testing import local_run
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import Snapshot, assemble, train_on_rank
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.initialize import Runtime, local_runtime
from tests.gpu.shared_gpu import GLOO, NCCL, SHARED_GPU, Ranks, ranks_of
from tests.parity.matrix import compared, covering, settings
from tests.parity.matrix.combination import Combination
from tests.parity.matrix.design import pairwise

NO_DROPOUT = ("--attention-dropout", "0", "--hidden-dropout", "0")
MOST, MOST_OF_NCCL = 30, 12
"""Largest numbers of combinations that are tested per world size, over gloo and over NCCL. The 30 combinations for one
rank include every choice. NCCL tests are limited to fewer combinations, because messages between ranks on one GPU are
slow."""

MOST_OF_TRIALS = 2

ON_HOST = ("sin", "cos", "exp", "log1p")
"""Functions that round differently on different devices. The tests compute these functions on the host in fp32 for
every model dtype."""


def on_host(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.cpu()).to(x.device) if x.dtype == torch.float32 else function(x)


def on_device(device: str) -> Callable[[RunConfig, int, int], Runtime]:
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    return lambda config, rank, size: replace(local_runtime(config, rank, size), device=place)


def train_all(rank: int, world_size: int, combinations: Sequence[Combination], ranks: Ranks, folder: Path) -> None:
    """Train all combinations, and write the results of each combination to a file. For a combination that fails, write
    the traceback instead. One process per rank runs all combinations, because initializing the GPU in each process
    takes a long time."""
    if ranks.device == "cuda":
        torch.cuda.set_device(0)
        for name in ON_HOST:
            setattr(Tensor, name, on_host(getattr(Tensor, name)))
    for number, combination in enumerate(combinations):
        flags = [*combination.argv, *NO_DROPOUT, "--distributed-backend", ranks.backend]
        if ranks.device == "cuda":
            flags.remove("--cpu")
        with settings(combination), mock.patch.object(local_run, "local_runtime", on_device(ranks.device)):
            unseen = int(combination["norm"] != "awaited")
            try:
                config = resolve_legal(parse_args(flags), world_size)
                found: object = train_on_rank(rank, world_size, config, 2 - unseen, False, unseen)
            except Exception as error:
                if world_size > 1:  # the other ranks would wait for this rank
                    error.add_note(f"combination: {combination}")
                    raise
                found = traceback.format_exc()
        (folder / f"{number}-{rank}").write_bytes(pickle.dumps(found))


def differing(world_size: int, ranks: Ranks, folder: Path, most: int) -> Iterator[str]:
    """Compare combinations with one process, and yield a description of each combination whose results differ."""
    combinations = covering([each for each in pairwise() if each.world_size == world_size])[:most]
    run_world(world_size, train_all, combinations, ranks, folder, backend=ranks.backend)
    for number, combination in enumerate(combinations):
        of_ranks = [pickle.loads((folder / f"{number}-{rank}").read_bytes()) for rank in range(world_size)]
        if problems := [each for each in of_ranks if isinstance(each, str)]:
            yield f"{combination}: {problems[0]}"
            continue

        def trained(*args: object, unseen: int, of_ranks: list[list[object]] = of_ranks) -> Snapshot:
            return assemble(fragment for fragments in of_ranks for fragment in fragments)  # type: ignore[misc]

        wrong, error = compared(combination, NO_DROPOUT, trained)
        print(f"{combination}: {error:.1e}")
        if wrong is not None:
            yield f"{combination}: {wrong}"


@pytest.mark.parametrize(("world_size", "ranks"), [(1, SHARED_GPU), (2, SHARED_GPU), (2, NCCL), (4, NCCL)], ids=str)
def test_combinations_compute_the_same_as_the_cpu(
    world_size: int, ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    here = ranks_of(request, ranks)
    most = {SHARED_GPU: MOST, NCCL: MOST_OF_NCCL, GLOO: MOST_OF_TRIALS}[here]
    assert list(differing(world_size, here, tmp_path, most)) == []
