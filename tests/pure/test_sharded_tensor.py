"""Tests of the conversion of ranges of a flat buffer to N-dimensional blocks, which torch.distributed.checkpoint (DCP)
saves and loads."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.boxes import boxes_of_flat_range
from megatron.core.dist_checkpointing.checkpoint_writer import HostStaging
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import Checkpoint, CheckpointError, save
from megatron.core.parallel_state import Axis


@st.composite
def shards(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, int]:
    """Draw the shape of a global tensor, the offset and shape of a local block, and the start and end of a flat range
    in the block."""
    shape = draw(st.lists(st.integers(1, 5), max_size=5))
    offset = [draw(st.integers(0, 3)) for _ in shape]
    whole = [o + n + draw(st.integers(0, 2)) for o, n in zip(offset, shape, strict=True)]
    start, stop = sorted(draw(st.tuples(st.integers(0, prod(shape)), st.integers(0, prod(shape)))))
    return whole, offset, shape, start, stop


@given(shards())
@settings(max_examples=500, deadline=None)
def test_boxes_tile_the_range(shard: tuple[list[int], list[int], list[int], int, int]) -> None:
    whole, offset, shape, start, stop = shard
    place = torch.arange(prod(whole)).view(whole)
    local = place[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].reshape(-1)
    boxes = boxes_of_flat_range(offset, shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    at = start
    for box in boxes:
        assert box.start == at and box.stop - box.start == prod(box.shape) > 0
        inside = place[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))]
        assert torch.equal(inside.reshape(-1), local[box.start : box.stop])
        at = box.stop
    assert at == (stop if boxes else start) and (boxes or start == stop)


def test_wrapper_has_the_global_size_and_refuses_arithmetic() -> None:
    boxes = ShardedBoxes((4, 6), [((2, 0), torch.ones(1, 6, dtype=torch.bfloat16))])
    assert boxes.size() == (4, 6) and boxes.dtype == torch.bfloat16 and boxes.device.type == "cpu"
    assert "(2, 0)" in repr(boxes)
    with pytest.raises(TypeError, match="only locates data and supports no computation"):
        torch.add(boxes, 1)
    with pytest.raises(AssertionError, match="box"):
        ShardedBoxes((4, 6), [((2, 1), torch.ones(1, 6))])


def test_overlapping_boxes_and_dtype_changes_survive_a_round_trip(tmp_path) -> None:
    """A single call of `load` fills target blocks that overlap and have different dtypes."""
    values = torch.randn(4, 6)
    scalar = torch.tensor(2.5)
    halves = [((0, 0), values[:, :2]), ((0, 2), values[:, 2:])]
    state = {"a": ShardedBoxes((4, 6), halves), "scalar": ShardedBoxes((), [((), scalar)])}
    state["empty"] = ShardedBoxes((0, 3), [((0, 0), torch.ones(0, 3))])
    folder = save(tmp_path, 3, state, {"iteration": 3}, Axis())

    whole, row, corner = torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(1, 6), torch.zeros(2, 2)
    loaded = torch.zeros((), dtype=torch.float64)
    boxes = [((0, 0), whole), ((0, 0), row), ((0, 0), corner), ((3, 5), torch.zeros(1, 1))]
    targets = {"a": ShardedBoxes((4, 6), boxes), "scalar": ShardedBoxes((), [((), loaded)])}
    targets["empty"] = ShardedBoxes((0, 3), [])
    Checkpoint(folder).load(targets, Axis())
    assert torch.equal(whole, values.bfloat16())
    assert torch.equal(row, values[:1]) and torch.equal(corner, values[:2, :2])
    assert boxes[3][1].item() == values[3, 5] and loaded.item() == 2.5


def test_replicas_do_not_write(tmp_path) -> None:
    values = torch.arange(6.0)
    with pytest.raises(CheckpointError, match="cannot write checkpoint"):
        save(tmp_path, 1, {"a": ShardedBoxes((6,), [((0,), values), ((3,), values[3:])])}, {}, Axis())
    tied = ShardedBoxes((6,), [((0,), values), ((0,), values.clone())])
    silent = ShardedBoxes((6,), [((0,), values)], writes=False)
    checkpoint = Checkpoint(save(tmp_path, 2, {"tied": tied, "silent": silent}, {}, Axis()))
    assert list(checkpoint.tensors) == ["tied"] and checkpoint.tensors["tied"].boxes == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_buffer_is_written_without_a_copy(dtype: torch.dtype) -> None:
    """DCP copies a tensor if its storage is larger than the tensor. To avoid this copy, the storage must have exactly
    the size of the tensor."""
    buffer = torch.arange(24).to(dtype)
    boxes = ShardedBoxes((6, 2), [((0, 0), buffer[4:8].view(2, 2)), ((2, 0), buffer[8:16].view(4, 2))])
    for index, (offset, first) in enumerate((((0, 0), 4), ((2, 0), 8))):
        data = boxes.__get_tensor_shard__(MetadataIndex("a", offset, index))
        assert data.untyped_storage().nbytes() == data.nbytes and data[0, 0] == first
        data[0, 0] = -1
        assert buffer[first] == -1


def test_staged_copies_use_preallocated_memory() -> None:
    tensors = {
        "a": ShardedBoxes((4, 3), [((0, 0), torch.ones(4, 3))]),
        "b": ShardedBoxes((3,), [((1,), torch.ones(2))]),
    }
    staging = HostStaging()
    staging.prepare(tensors)
    staged = [staging.stage(tensors) for _ in range(2)]
    places = [[data.data_ptr() for boxes in each.values() for _, data in boxes.boxes] for each in staged]
    assert places[0] == places[1]
    for key, boxes in staged[1].items():
        assert boxes.shape == tensors[key].shape and boxes.boxes[0][0] == tensors[key].boxes[0][0]
        assert torch.equal(boxes.boxes[0][1], tensors[key].boxes[0][1])
    staging.release()
