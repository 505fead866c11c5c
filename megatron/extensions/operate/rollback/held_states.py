"""Training states that each rank keeps in host memory, so that a rollback does not have to read a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

import torch
from torch import Tensor

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.sharded_tensor import LocalBox
from megatron.core.dist_checkpointing.state_dict import MAIN_PARAM, StateDict, model_key, optimizer_key
from megatron.core.dist_checkpointing.storage import Checkpoint, TensorInfo
from megatron.core.parallel_state import Axis

MAIN = optimizer_key(MAIN_PARAM, "")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape of a shard within its tensor."""


@dataclass
class HeldState:
    """Copy of this rank's tensor shards after one step, in host memory. The memory may be reused for the state after a
    later step."""

    iteration: int = -1
    payload: dict[str, object] = field(default_factory=dict)
    boxes: dict[str, list[LocalBox]] = field(default_factory=dict)

    def take(self, iteration: int, tensors: StateDict, payload: dict[str, object]) -> None:
        """Copy the state of a step. Copies from a GPU are asynchronous, and are launched on the current stream of the
        GPU."""
        self.iteration, self.payload = iteration, payload
        if not self.boxes:
            self.boxes = {key: [_room(box) for box in tensors[key].boxes] for key in tensors}
        assert self.boxes.keys() == tensors.keys(), "the training state contains other tensors than before"
        for key, rooms in self.boxes.items():
            for (_, room), (_, data) in zip(rooms, tensors[key].boxes, strict=True):
                room.copy_(data, non_blocking=True)


def _room(box: LocalBox) -> LocalBox:
    offset, data = box
    return offset, torch.empty(data.shape, dtype=data.dtype, pin_memory=data.is_cuda)


def tensors_of_world(tensors: StateDict, world: Axis) -> dict[str, TensorInfo]:
    """Return the shape, the dtype and the number of shards of every tensor in the state of all ranks. Collective."""
    mine = {key: (tuple(tensors[key].shape), tensors[key].dtype, len(tensors[key].boxes)) for key in tensors}
    return {key: TensorInfo(*about) for part in gather_objects(mine, world) for key, about in part.items()}


class HeldCheckpoint(Checkpoint):
    """Checkpoint that loads a state from host memory. Only the process that holds the state can load this checkpoint,
    and only with the same parallel layout."""

    def __init__(self, held: HeldState, tensors: Mapping[str, TensorInfo]) -> None:
        self.folder = PurePath(f"memory/iter_{held.iteration:07d}")
        self.payload = json.loads(json.dumps(held.payload))
        self.tensors = dict(tensors)
        self._holes = []
        self._boxes: dict[str, dict[Box, Tensor]] = {
            key: {(tuple(offset), tuple(data.shape)): data for offset, data in boxes}
            for key, boxes in held.boxes.items()
        }

    def load(self, targets: StateDict, world: Axis, ignore: Callable[[str], bool] = lambda key: False) -> None:
        """Load tensors in the same way as `Checkpoint.load`. The main parameter of a parameter is the higher-precision
        copy that the optimizer keeps. If a rank holds only a part of a main parameter, the parameter itself is loaded
        instead. The parameter is equal to the main parameter, rounded to lower precision."""
        self._check(targets, world, ignore)
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        for key, target in targets.items():
            for offset, data in target.boxes:
                data.copy_(self._box(key, (tuple(offset), tuple(data.shape))))

    def _box(self, key: str, where: Box) -> Tensor:
        found = self._boxes.get(key, {}).get(where)
        if found is None and key.startswith(MAIN):
            found = self._boxes.get(model_key(key.removeprefix(MAIN)), {}).get(where)
        assert found is not None, f"{key} at {where} is not held by this rank"
        return found


@dataclass
class HeldStates:
    """The last two states of a rank in host memory."""

    held: list[HeldState] = field(default_factory=list)
    """States in host memory, in order of iteration."""

    _free: list[HeldState] = field(default_factory=list)

    def next(self) -> HeldState:
        """Return the `HeldState` into which the caller copies the next state. If two states are in memory, the older
        one is overwritten."""
        room = self._free.pop() if self._free else self.held.pop(0) if len(self.held) > 1 else HeldState()
        self.held.append(room)
        return room

    def at(self, iteration: int) -> HeldState | None:
        """Return the state after an iteration; None if this state is not in memory."""
        return next((each for each in self.held if each.iteration == iteration), None)

    def drop_after(self, iteration: int) -> None:
        """Discard the states of later iterations."""
        self._free += [each for each in self.held if each.iteration > iteration]
        self.held = [each for each in self.held if each.iteration <= iteration]
