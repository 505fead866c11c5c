"""Sharded tensors for torch.distributed.checkpoint (DCP). `ShardedBoxes` describes one rank's boxes of a global tensor,
and `OptimizerPiece` describes one rank's optimizer state of a parameter.

A rank holds a rectangle ("box") of each parameter. Under ZeRO-1, a rank instead holds a range of the rectangle's
elements, flattened in row-major order. A flat range of a rectangle consists of a few boxes (`core.boxes`). DCP reshards
boxes: it loads the boxes of one layout from the boxes of any other layout. Each rank saves its state as it is in
memory, so no rank gathers or copies a whole tensor.

DCP reads boxes through three private torch methods, which only this file implements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from megatron.core.boxes import boxes_of_flat_range
from megatron.core.param_meta import ParamMeta
from megatron.core.torch_private import disabled_torch_function, wrapper_tensor

LocalBox = tuple[tuple[int, ...], Tensor]
"""Box (rectangular block) of a global tensor: a pair of its offset in the global tensor and a live view of its data."""


class ShardedBoxes(Tensor):
    """Boxes (rectangular blocks) of a global tensor, as stored on one rank. `ShardedBoxes.shape` is the global shape.
    The object itself stores no data; it refers to the tensors of its boxes.

    A save reads the tensors of the boxes. A load writes into the tensors of the boxes. If the dtype in the file
    differs, the data are converted. During a load, boxes may overlap, and every box is filled. During a save, the boxes
    with `writes=True` of all ranks together must tile the global tensor. Set `writes=False` for a replica of boxes that
    another rank writes.
    """

    boxes: list[LocalBox]
    writes: bool

    @staticmethod
    def __new__(cls, global_shape: Sequence[int], boxes: Sequence[LocalBox], writes: bool = True) -> ShardedBoxes:
        like = boxes[0][1] if boxes else torch.empty(0)
        self = wrapper_tensor(cls, global_shape, dtype=like.dtype, device=like.device)
        for offset, data in boxes:
            inside = all(o >= 0 and o + n <= g for o, n, g in zip(offset, data.shape, global_shape, strict=True))
            assert inside, f"box {offset} {tuple(data.shape)} of {tuple(global_shape)}"
        self.boxes = [(offset, data.detach()) for offset, data in boxes if data.numel()]
        self.writes = writes
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:  # type: ignore[override]
        raise TypeError(f"{func} on ShardedBoxes, which only locates data and supports no computation")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        boxes = [(offset, tuple(data.shape)) for offset, data in self.boxes]
        return f"ShardedBoxes({tuple(self.shape)}, {self.dtype}, boxes={boxes}, writes={self.writes})"

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """Return one write item for each box that this rank writes. If several boxes are equal, as for a tied weight
        that is stored twice, only the first box is written."""
        boxes = dict(reversed(self.boxes)) if self.writes else {}
        return [
            WriteItem(
                index=MetadataIndex(fqn, offset),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=torch.Size(offset), sizes=data.shape),
                    properties=TensorProperties(dtype=data.dtype),
                    size=self.size(),
                ),
            )
            for offset, data in boxes.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """List the boxes (rectangular blocks of the tensor) to load. During a load, DCP identifies a box (chunk) by its
        position in the returned list."""
        return [ChunkStorageMetadata(offsets=torch.Size(offset), sizes=data.shape) for offset, data in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the data of a box. DCP identifies the box by its position in the chunk list during a load, and by its
        offset during a save."""
        if index.index is not None and index.index < len(self.boxes):
            offset, data = self.boxes[index.index]
            if offset == index.offset:
                return without_surroundings(data)
        return next(without_surroundings(data) for offset, data in self.boxes if offset == index.offset)


def without_surroundings(data: Tensor) -> Tensor:
    """Return a tensor that shares the memory of `data`, but whose storage contains nothing except the elements of
    `data`.

    If the storage of a tensor is larger than the tensor's data, DCP copies the tensor before the write. All parameters,
    moments and staged copies are views of a buffer, so DCP would copy each of them.
    """
    if data.is_cuda or not data.is_contiguous():
        return data
    begin = data.storage_offset() * data.itemsize
    # This view of the storage keeps the whole buffer alive.
    storage = data.untyped_storage()[begin : begin + data.nbytes]
    return torch.empty(0, dtype=data.dtype).set_(storage, 0, data.shape, data.stride())


@dataclass(frozen=True)
class OptimizerPiece:
    """Optimizer state of elements [start, stop) of a parameter's local shard. The shard is flattened in row-major
    order.

    `data` is a live 1-D view of stop - start elements. A save reads from `data`, and a load writes to `data`. An
    `OptimizerPiece` may be empty. Without the distributed optimizer, every data-parallel rank holds the whole shard
    from 0 to its size.

    If the shape of the state differs from the shape of the parameter, `own_shape` is the shape of the state. In this
    case, the state is not sharded, and `start` and `stop` are positions in the whole state.
    """

    key: str
    """Kind of state, such as "main_param", "exp_avg", "exp_avg_sq" or "momentum_buffer"."""

    meta: ParamMeta
    data: Tensor
    start: int
    stop: int
    own_shape: tuple[int, ...] | None = None

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the unsharded state."""
        return self.meta.global_shape if self.own_shape is None else self.own_shape

    def __post_init__(self) -> None:
        assert self.data.dim() == 1 and self.data.numel() == self.stop - self.start, self.meta.name

    def boxes(self, coords: Mapping[str, tuple[int, int]]) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return the boxes (rectangular blocks of the global tensor) that make up this piece. Each box is a pair of its
        offset in the global tensor and a live view of its data. `coords` are the coordinates of the rank."""
        whole = self.own_shape
        local = self.meta.box(coords) if whole is None else ((0,) * len(whole), whole)
        flat = boxes_of_flat_range(*local, self.start, self.stop)
        return [(box.offset, self.data[box.start - self.start : box.stop - self.start].view(box.shape)) for box in flat]


def pieces_by_name(pieces: Iterable[OptimizerPiece]) -> dict[str, list[OptimizerPiece]]:
    """Return the pieces of each parameter, keyed by parameter name."""
    found: dict[str, list[OptimizerPiece]] = {}
    for piece in pieces:
        found.setdefault(piece.meta.name, []).append(piece)
    return found
