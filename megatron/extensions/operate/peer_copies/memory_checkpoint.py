"""Checkpoint that reads the training state from copies in the memory of hosts. The checkpoint can be loaded under any
parallel layout. Loading verifies the checksum of each tensor shard."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.core.dist_checkpointing.storage import Checkpoint, TensorInfo
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.peer_copies.client import Address, Link, RefusedError, reached
from megatron.extensions.operate.peer_copies.holder import read_header, unsealed
from megatron.extensions.operate.peer_copies.sets import CompleteSet, Copy
from megatron.extensions.operate.peer_copies.shards import Entry, Offset


class CopyError(RuntimeError):
    """Raised if copies in memory cannot be used."""


@dataclass(frozen=True)
class Header:
    """Content of the header file of a copy: the tensor shards in the copied part of the training state, the checksums
    of these shards, and the metadata of the checkpoint."""

    entries: tuple[Entry, ...]
    sums: tuple[int, ...]
    payload: dict[str, Any] | None

    @classmethod
    def read(cls, path: Path) -> Header:
        """Read the header of a data file."""
        return cls.of(read_header(path))

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Header:
        """Create a header from the fields that were read from JSON."""
        entries = tuple(map(Entry.from_record, record["entries"]))
        return cls(entries, tuple(record["sums"]), record["payload"])


def damaged(folder: Path, copies: Iterable[Copy]) -> list[Copy]:
    """Return the copies on this host that cannot be read, or in which a tensor shard has a wrong checksum."""
    found = []
    for copy in copies:
        path = folder / copy.generation / copy.file
        try:
            header = Header.read(path)
            with open(path, "rb") as file:
                for entry, crc in zip(header.entries, header.sums, strict=True):
                    file.seek(entry.start)
                    if zlib.crc32(file.read(entry.nbytes)) != crc:
                        raise ValueError(f"{entry.key} is damaged")
        except (OSError, ValueError):
            found.append(copy)
    return found


class Readers:
    """Reader of copies in the memory of hosts. Copies on other hosts are read through connections to the holder
    processes of these hosts. Connections stay open until `close` is called. `idle` contains the hosts on which no rank
    runs."""

    def __init__(
        self, folder: Path, own: str, holders: Mapping[str, Address], idle: Collection[str] = frozenset()
    ) -> None:
        self.folder, self.own = folder, own
        self.holders, self.idle = holders, idle
        self._links = dict[str, Link]()
        self._lost = dict[str, str]()
        """Maps each host whose holder process did not answer to the error message. No further requests are sent to
        these holders."""

    def read(self, copies: Sequence[Copy], entry: Entry, crc: int) -> bytearray:
        """Read a tensor shard from a copy that is not damaged, if possible from the copy on this host. Raises CopyError
        if all copies are damaged."""
        problems = []
        for copy in sorted(copies, key=lambda copy: copy.host != self.own):
            data = bytearray(entry.nbytes)
            try:
                self._fill(copy, entry.start, memoryview(data))
            except OSError as error:
                problems.append(f"{copy.host}: {error}")
                continue
            if zlib.crc32(data) == crc:
                return data
            problems.append(f"{copy.host}: its checksum is wrong")
        raise CopyError(f"{entry.key} at {entry.offset} of part {copies[0].part} is lost: {'; '.join(problems)}")

    def _fill(self, copy: Copy, start: int, into: memoryview) -> None:
        if copy.host == self.own:
            with open(self.folder / copy.generation / copy.file, "rb") as file:
                file.seek(start)
                if file.readinto(into) < len(into):
                    raise OSError("the file is shorter than stated in its header")
            return
        with self._asking(copy.host) as link:
            link.get(copy.generation, copy.file, start, into)

    def headers(self, found: CompleteSet, of_idle: bool) -> dict[str, Header]:
        """Read the headers of all parts whose first copy is on this host, and omit headers that cannot be read. If
        `of_idle` is True, also read the headers of parts whose first copy is on a host without ranks."""
        headers = {}
        for part, copies in found.copies.items():
            first = copies[0]
            with suppress(OSError, ValueError):
                if first.host == self.own:
                    headers[part] = Header.read(self.folder / first.generation / first.file)
                elif of_idle and first.host in self.idle:
                    with self._asking(first.host) as link:
                        content = link.header(first.generation, first.file)
                    headers[part] = Header.of(unsealed(content))
        return headers

    @contextmanager
    def _asking(self, host: str) -> Iterator[Link]:
        """Provide a connection to the holder process of a host for the `with` block. If the holder does not answer,
        later calls for this host fail at once. Raises OSError if the holder does not answer or refuses a request."""
        if host in self._lost:
            raise OSError(self._lost[host])
        try:
            if host not in self._links:
                self._links[host] = reached(self.holders[host])
            yield self._links[host]
        except RefusedError:
            self._links.pop(host).close()  # the holder also closes a connection after it refuses a request
            raise
        except OSError as error:
            self._lost[host] = str(error)
            raise

    def close(self) -> None:
        """Close the connections."""
        for link in self._links.values():
            link.close()


@dataclass(frozen=True)
class StoredBox:
    """Tensor shard that is stored in one or more copies of the training state."""

    entry: Entry
    crc: int
    copies: tuple[Copy, ...]


class MemoryCheckpoint(Checkpoint):
    """Checkpoint that consists of the copies of one step in the memory of hosts. The constructor is a collective over
    `world`. The constructor raises CopyError on every rank if the header of a part cannot be read."""

    def __init__(self, found: CompleteSet, readers: Readers, reads_headers: bool, world: Axis) -> None:
        """Read the headers of all copies. `reads_headers` must be True on exactly one rank of each host, which then
        reads the headers of the copies on its host for all ranks."""
        self.folder: PurePath = PurePath(f"copies in memory/iter_{found.iteration:07d}")
        self._readers = readers
        mine = readers.headers(found, of_idle=world.rank == 0) if reads_headers else {}
        headers = {part: header for each in gather_objects(mine, world) for part, header in each.items()}
        payloads = [header.payload for header in headers.values() if header.payload is not None]
        if len(payloads) != 1 or headers.keys() != found.copies.keys():
            raise CopyError(
                f"{len(headers)} of {len(found.copies)} headers of copies could be read, and {len(payloads)} of them "
                "contain checkpoint metadata (expected: 1)"
            )
        self.payload: dict[str, Any] = payloads[0]
        self._boxes: dict[str, dict[Offset, StoredBox]] = {}
        for part, header in headers.items():
            for entry, crc in zip(header.entries, header.sums, strict=True):
                self._boxes.setdefault(entry.key, {})[entry.offset] = StoredBox(entry, crc, found.copies[part])
        self.tensors = {
            key: TensorInfo(box.entry.whole, box.entry.torch_dtype, len(boxes))
            for key, boxes in self._boxes.items()
            for box in [next(iter(boxes.values()))]
        }
        covered = {key: sum(_numel(box.entry.shape) for box in boxes.values()) for key, boxes in self._boxes.items()}
        self._holes = [key for key, info in self.tensors.items() if covered[key] != info.numel]

    def load(self, targets: StateDict, world: Axis, ignore: Callable[[str], bool] = lambda key: False) -> None:
        """Load tensors in the same way as `Checkpoint.load`. Raises CopyError on every rank if a tensor shard is lost.
        When this error is raised, some targets may already be overwritten."""
        self._check(targets, world, ignore)
        problem = ""
        try:
            for key, target in targets.items():
                for offset, data in target.boxes:
                    self._load_box(key, offset, data)
        except CopyError as error:
            problem = str(error)
        self._readers.close()
        if problems := [each for each in gather_objects(problem, world) if each]:
            raise CopyError(problems[0])

    def _load_box(self, key: str, offset: Offset, data: Tensor) -> None:
        for box, here, there in self._overlaps(key, offset, tuple(data.shape)):
            stored = torch.frombuffer(self._readers.read(box.copies, box.entry, box.crc), dtype=box.entry.torch_dtype)
            data[here].copy_(stored.view(box.entry.shape)[there])

    def _overlaps(
        self, key: str, offset: Offset, shape: Sequence[int]
    ) -> Iterator[tuple[StoredBox, tuple[slice, ...], tuple[slice, ...]]]:
        """Find the stored shards that overlap the requested part of a tensor, which begins at `offset` and has the
        given shape. Yield a triple for each of these shards: the shard, the slices of the overlap in the requested
        part, and the slices of the overlap in the shard."""
        exact = self._boxes[key].get(offset)
        if exact is not None and exact.entry.shape == tuple(shape):
            whole = (slice(None),) * len(offset)
            yield exact, whole, whole
            return
        for box in self._boxes[key].values():
            ranges = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(offset, shape, box.entry.offset, box.entry.shape, strict=True)
            ]
            if box.entry.nbytes and all(start < stop for start, stop in ranges):
                here = tuple(slice(start - a, stop - a) for (start, stop), a in zip(ranges, offset, strict=True))
                there = tuple(
                    slice(start - b, stop - b) for (start, stop), b in zip(ranges, box.entry.offset, strict=True)
                )
                yield box, here, there


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
