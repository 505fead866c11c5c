"""Parts of the training state that a rank stores. A part consists of tensor shards, one after the other in a file.

The state is the content of a checkpoint (`RunCheckpoint.contents`), so it is complete and can be loaded under any
layout. If the optimizer keeps a higher-precision copy of a parameter (its main parameter), the parameter itself is
omitted, because a resumed run loads only the main parameter.
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
    """Tensor shard in a part of the training state: its position in the tensor, and its position in the file of the
    part."""

    key: str
    whole: tuple[int, ...]
    """Shape of the full tensor."""

    dtype: str
    offset: Offset
    shape: tuple[int, ...]
    start: int
    """Byte offset of the shard in the file of the part."""

    nbytes: int

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Entry:
        """Create an entry from the fields that were read from JSON."""
        lists = {name: tuple(record[name]) for name in ("whole", "offset", "shape")}
        return cls(**{**record, **lists})

    @property
    def record(self) -> dict[str, object]:
        """Return the fields of the entry as a dict that can be serialized as JSON."""
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
    """Part of the training state that this rank can store on its host, because the rank holds all bytes of the part."""

    part: Part
    keys: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the part. All ranks that hold the bytes of the part compute the same name."""
        if len(self.part.replicas) == 1:
            return f"{self.part.writer}-own"
        return f"{self.part.writer}-of-{zlib.crc32(repr(self.part.replicas).encode()):08x}"


def boxes_of(tensors: StateDict, key: str) -> dict[Offset, Tensor]:
    """Return the shards of a tensor that this rank holds, keyed by their offset in the tensor. If several shards have
    the same offset, only the first of them is returned."""
    return dict(reversed(tensors[key].boxes))


def parts_of(tensors: StateDict, state: ParallelState, rank: int) -> list[Stored]:
    """Return all parts of the training state whose bytes this rank holds. The first part contains the tensors that only
    this rank holds. Each other part contains tensors that the same set of data-parallel ranks holds. This function is a
    collective over the data-parallel ranks."""
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
    """Return an entry for each tensor shard in `stored`. The entry contains the byte offset of the shard in the file of
    this part of the training state."""
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
    """File on an in-memory file system. The bytes of the file are mapped as a tensor. If `pin` is True, the memory is
    page-locked for copies from a GPU."""

    def __init__(self, path: Path, nbytes: int, pin: bool) -> None:
        self.path, self.nbytes = path, nbytes
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, nbytes)
            if nbytes:  # raises an error if memory is full; otherwise, a later write would raise a signal
                os.posix_fallocate(file, 0, nbytes)
            self.memory = mmap.mmap(file, nbytes) if nbytes else mmap.mmap(-1, 1)
        except OSError:
            path.unlink(missing_ok=True)  # delete the file, because it may occupy memory
            raise
        finally:
            os.close(file)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)[:nbytes]
        if pin and nbytes:  # if page-locking fails, copies are slower but correct
            torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), nbytes, 0)

    @property
    def view(self) -> memoryview:
        """View of the bytes of the file, without a copy."""
        return memoryview(self.memory)[: self.nbytes]

    def stage(self, entries: Sequence[Entry], boxes: Iterable[Tensor]) -> None:
        """Copy the tensor shards `boxes` into the file, at the offsets that `entries` contain. Copies from a GPU are
        asynchronous, and are launched on the current stream of the GPU."""
        for entry, data in zip(entries, boxes, strict=True):
            into = self.bytes[entry.start : entry.start + entry.nbytes].view(data.dtype).view(data.shape)
            into.copy_(data, non_blocking=True)

    def sums(self, entries: Sequence[Entry]) -> list[int]:
        """Return the checksum of each tensor shard in the file."""
        view = self.view
        return [zlib.crc32(view[entry.start : entry.start + entry.nbytes]) for entry in entries]
