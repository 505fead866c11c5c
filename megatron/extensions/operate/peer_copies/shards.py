"""Parts of the training state that a rank stores. A part consists of boxes of tensors at byte offsets.

The state is the content of a checkpoint (`RunCheckpoint.contents`), so it is complete and can be loaded under any
layout. Only parameters that have a main parameter are omitted, because a resumed run does not read them.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.state_dict import MAIN_PARAM, MODEL, StateDict, optimizer_key
from megatron.core.parallel_state import ParallelState
from megatron.extensions.operate.peer_copies.placement import Part

ALIGNMENT = 64

Offset = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """Box of a tensor within a part."""

    key: str
    whole: tuple[int, ...]
    """Shape of the whole tensor."""

    dtype: str
    offset: Offset
    shape: tuple[int, ...]
    start: int
    """Byte offset of the box in the part."""

    nbytes: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Entry:
        """Convert an entry from JSON types."""
        lists = {name: tuple(record[name]) for name in ("whole", "offset", "shape")}
        return cls(**{**record, **lists})

    @property
    def record(self) -> dict[str, object]:
        """Convert the entry to JSON types."""
        return asdict(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype with the given name, such as float32. Raises ValueError if the name is unknown."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name}")
    return found


@dataclass(frozen=True)
class Stored:
    """Part that this rank can store."""

    part: Part
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the part, which is the same on all ranks that hold the part."""
        if len(self.part.replicas) == 1:
            return f"{self.part.writer}-own"
        return f"{self.part.writer}-of-{zlib.crc32(repr(self.part.replicas).encode()):08x}"


def boxes_of(tensors: StateDict, key: str) -> dict[Offset, Tensor]:
    """Return this rank's boxes of a tensor, keyed by offset. If several boxes have the same offset, return only the
    first of them."""
    return dict(reversed(tensors[key].boxes))


def parts_of(tensors: StateDict, state: ParallelState, rank: int) -> list[Stored]:
    """Return the parts whose bytes this rank holds. The first part is the part that this rank writes to a checkpoint.
    The other parts are written to the checkpoint by data-parallel replicas with equal boxes. Collective over the
    data-parallel ranks."""
    mine = {key: (_boxes_text(tensors, key), tensors[key].writes) for key in tensors if tensors[key].boxes}
    found = gather_objects((rank, mine), state.dp_cp)
    main = {key for _, held in found for key in held if key.startswith(optimizer_key(MAIN_PARAM, ""))}
    keys: dict[tuple[int, tuple[int, ...]], list[str]] = {(rank, (rank,)): []}
    for key in sorted(mine):
        if key.startswith(MODEL) and optimizer_key(MAIN_PARAM, key.removeprefix(MODEL)) in main:
            continue
        alike = [(other, held[key][1]) for other, held in found if key in held and held[key][0] == mine[key][0]]
        writer = next((other for other, writes in alike if writes), None)
        if writer is not None:
            keys.setdefault((writer, tuple(other for other, _ in alike)), []).append(key)
    parts = []
    for (writer, replicas), names in keys.items():
        nbytes = sum(map(_padded, (data for key in names for data in boxes_of(tensors, key).values())))
        parts.append(Stored(Part(writer, replicas, nbytes), tuple(names)))
    return parts


def _boxes_text(tensors: StateDict, key: str) -> str:
    return repr([(offset, tuple(data.shape), data.dtype) for offset, data in boxes_of(tensors, key).items()])


def entries_of(stored: Stored, tensors: StateDict) -> list[Entry]:
    """Return one entry for each box of a part. The entry contains the byte offset of the box in the part."""
    entries, at = list[Entry](), 0
    for key in stored.keys:
        for offset, data in boxes_of(tensors, key).items():
            dtype = str(data.dtype).removeprefix("torch.")
            entries.append(Entry(key, tuple(tensors[key].shape), dtype, offset, tuple(data.shape), at, data.nbytes))
            at += _padded(data)
    return entries


def _padded(data: Tensor) -> int:
    return -(-data.nbytes // ALIGNMENT) * ALIGNMENT


class Slot:
    """File in memory that is mapped as a tensor. If the file stores copies from a GPU, its memory is page-locked."""

    def __init__(self, path: Path, nbytes: int, pin: bool) -> None:
        self.path, self.nbytes = path, nbytes
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, nbytes)
            if nbytes:  # raises an error if memory is full, instead of a signal when the memory is written
                os.posix_fallocate(file, 0, nbytes)
            self.memory = mmap.mmap(file, nbytes) if nbytes else mmap.mmap(-1, 1)
        except OSError:
            path.unlink(missing_ok=True)  # deleting the file releases its memory
            raise
        finally:
            os.close(file)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)[:nbytes]
        if pin and nbytes:  # if page-locking fails, copies are slower but correct
            torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), nbytes, 0)

    @property
    def view(self) -> memoryview:
        """Return the bytes of the slot."""
        return memoryview(self.memory)[: self.nbytes]

    def stage(self, entries: Sequence[Entry], boxes: Iterable[Tensor]) -> None:
        """Start to copy the boxes of a part into the slot. Copies from a GPU run asynchronously on the GPU's current
        stream."""
        for entry, data in zip(entries, boxes, strict=True):
            into = self.bytes[entry.start : entry.start + entry.nbytes].view(data.dtype).view(data.shape)
            into.copy_(data, non_blocking=True)

    def sums(self, entries: Sequence[Entry]) -> list[int]:
        """Return the checksums of all boxes."""
        view = self.view
        return [zlib.crc32(view[entry.start : entry.start + entry.nbytes]) for entry in entries]
