"""Loading a checkpoint needs little memory in addition to the loaded tensors: at most the buffers of DCP and one
parameter."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import save
from megatron.core.parallel_state import Axis
from megatron.training.checkpoints.loading import choose_checkpoint
from tests.harness import run_world

ROWS, COLUMNS, TENSORS = 3072, 3072, 4
NBYTES = ROWS * COLUMNS * 4
MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of malloc.h."""

CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    return next(1024 * int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(field))


def give_back_pages() -> None:
    """Make the allocator return all freed buffers to the kernel, and return further buffers as soon as they are freed.
    By default, glibc raises its mmap threshold when a large buffer is freed. Buffers below the threshold are then
    allocated on the heap, and freed buffers on the heap still count as resident memory."""
    libc = ctypes.CDLL(None)
    assert libc.mallopt(MMAP_THRESHOLD, 1 << 16) == 1
    libc.malloc_trim(0)


def empty() -> dict[str, torch.Tensor]:
    """Return tensors whose pages are resident in memory."""
    return {f"model.{number}": torch.zeros(ROWS, COLUMNS) for number in range(TENSORS)}


def in_boxes(tensors: dict[str, torch.Tensor], cuts: int) -> dict[str, ShardedBoxes]:
    """Split the rows of each tensor into `cuts` parts, and return the parts as `ShardedBoxes`."""
    step = ROWS // cuts
    return {
        key: ShardedBoxes((ROWS, COLUMNS), [((i * step, 0), part) for i, part in enumerate(data.split(step))])
        for key, data in tensors.items()
    }


def peaks(rank: int, world_size: int, root: Path) -> dict[str, int]:
    """Return the peak memory of several ways to load a checkpoint. The memory of the tensors into which the checkpoint
    is loaded is not counted."""
    tensors, found = empty(), {}

    def dcp_load() -> None:
        dcp.load(dict(tensors), checkpoint_id=root / "dcp", no_dist=True)

    def own_load() -> None:
        checkpoint = choose_checkpoint(root / "own", Axis())
        assert checkpoint is not None
        checkpoint.load(in_boxes(tensors, 1), Axis())

    def own_load_cut_otherwise() -> None:
        checkpoint = choose_checkpoint(root / "own", Axis())
        assert checkpoint is not None
        checkpoint.load(in_boxes(tensors, 4), Axis())

    for way in (dcp_load, own_load, own_load_cut_otherwise):
        for data in tensors.values():
            data.zero_()
        give_back_pages()
        CLEAR.write_text("5")
        before = resident("VmRSS")
        way()
        found[way.__name__] = resident("VmHWM") - before
        assert all((data == 1).all() for data in tensors.values())
    return found


def write(rank: int, world_size: int, root: Path) -> None:
    tensors = {key: data.fill_(1) for key, data in empty().items()}
    dcp.save(dict(tensors), checkpoint_id=root / "dcp", no_dist=True)
    save(root / "own", 1, in_boxes(tensors, 2), {}, Axis())


@pytest.mark.skipif(not CLEAR.exists(), reason="the kernel cannot reset the peak memory of a process")
def test_loading_takes_no_more_than_dcp_and_one_parameter(tmp_path: Path) -> None:
    run_world(1, write, tmp_path)
    (found,) = run_world(1, peaks, tmp_path)
    assert found["dcp_load"] > 0
    for way in ("own_load", "own_load_cut_otherwise"):
        assert found[way] < found["dcp_load"] + NBYTES, (found, NBYTES)
