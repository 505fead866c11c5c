"""One process copies its state into memory and checks the copies. A process with a different parallel layout then loads
its shards from the copies."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.peer_copies.holder import WORLD, header_of, sealed, write_whole
from megatron.extensions.operate.peer_copies.memory_checkpoint import (
    CopyError,
    MemoryCheckpoint,
    Readers,
    damaged,
)
from megatron.extensions.operate.peer_copies.placement import Part
from megatron.extensions.operate.peer_copies.sets import CompleteSet, complete_sets, inventory
from megatron.extensions.operate.peer_copies.shards import Slot, Stored, boxes_of, entries_of

GENERATION = "g000001-0123abcd"
ROWS, COLUMNS = 12, 5


def values() -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def cut(tensor: torch.Tensor, rows: list[int], column: int) -> StateDict:
    """Cut the tensor into blocks at the given row boundaries, and split each block in two at column `column`."""
    found = []
    for begin, end in pairwise(rows):
        for left, right in ((0, column), (column, COLUMNS)):
            found.append(((begin, left), tensor[begin:end, left:right].clone()))
    return {"model.x": ShardedBoxes((ROWS, COLUMNS), found), "model.none": ShardedBoxes((0,), [])}


def store(folder: Path, tensors: StateDict, host: str, iteration: int = 3) -> None:
    """Write the copies of a host. The copies consist of a single part, which contains `tensors`."""
    (folder / GENERATION).mkdir(parents=True, exist_ok=True)
    write_whole(folder / GENERATION / WORLD, json.dumps({"parts": ["0-own"]}))
    stored = Stored(Part(0, (0,), 0), ("model.x",))
    entries = entries_of(stored, tensors)
    slot = Slot(folder / GENERATION / "0-own.0", entries[-1].start + entries[-1].nbytes, pin=False)
    slot.stage(entries, boxes_of(tensors, "model.x").values())
    header = {"iteration": iteration, "part": "0-own", "nbytes": slot.nbytes, "payload": {"iteration": iteration}}
    header |= {"sums": slot.sums(entries), "entries": [entry.record for entry in entries]}
    write_whole(header_of(slot.path), sealed(json.dumps(header).encode()))


def found_in(folder: Path, host: str = "here") -> CompleteSet:
    (found,) = complete_sets([inventory(folder, host)])
    return found


def opened(folder: Path) -> MemoryCheckpoint:
    return MemoryCheckpoint(found_in(folder), Readers(folder, "here", {}), True, Axis())


rows = st.sets(st.integers(1, ROWS - 1), max_size=4).map(lambda inner: [0, *sorted(inner), ROWS])
column = st.integers(1, COLUMNS - 1)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows, column, rows, column)
def test_boxes_load_into_other_boxes(
    tmp_path: Path, before: list[int], left: int, after: list[int], right: int
) -> None:
    store(tmp_path, cut(values(), before, left), "here")
    targets = cut(torch.zeros(ROWS, COLUMNS), after, right)
    checkpoint = opened(tmp_path)
    checkpoint.load({"model.x": targets["model.x"]}, Axis())
    for (row, start), data in targets["model.x"].boxes:
        assert data.equal(values()[row : row + data.shape[0], start : start + data.shape[1]])
    assert checkpoint.payload == {"iteration": 3}


def flip(folder: Path, at: int = 5) -> None:
    path = folder / GENERATION / "0-own.0"
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def test_a_flipped_bit_is_found_before_and_while_it_is_read(tmp_path: Path) -> None:
    store(tmp_path, cut(values(), [0, 4, ROWS], 2), "here")
    copies = found_in(tmp_path).copies["0-own"]
    assert damaged(tmp_path, copies) == []
    checkpoint = opened(tmp_path)
    flip(tmp_path)
    assert damaged(tmp_path, copies) == list(copies)
    assert found_in(tmp_path).without(copies).lost == "0-own"
    with pytest.raises(CopyError, match="its checksum is wrong"):
        checkpoint.load({"model.x": cut(values(), [0, ROWS], 1)["model.x"]}, Axis())


def test_a_missing_state_is_refused(tmp_path: Path) -> None:
    store(tmp_path, cut(values(), [0, ROWS], 2), "here")
    with pytest.raises(ValueError, match=r"missing from the checkpoint: model\.y"):
        opened(tmp_path).load({"model.y": cut(values(), [0, ROWS], 2)["model.x"]}, Axis(), ignore=lambda key: True)
