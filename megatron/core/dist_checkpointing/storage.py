"""Checkpoint storage: atomic saves, strict loads, and safe reading of untrusted files.

    root/latest_checkpointed_iteration.txt      number of the newest complete checkpoint
    root/iter_0000100/metadata.json             everything that is not a tensor
    root/iter_0000100/.metadata, __*.distcp     tensors, as DCP writes them
    root/iter_0000100/manifest.json             the files above with their sizes and checksums

A checkpoint becomes visible once it is complete (`file_storage`): on the local disk it is written into a temporary
folder, synced and renamed. The iteration number in latest_checkpointed_iteration.txt is replaced only after the rename.
The text file therefore always names a complete checkpoint, even if the run is killed during a save.

Files may come from untrusted sources. Everything except tensors is stored as JSON. The pickled index of DCP may contain
only allowed names, and tensors are read with `weights_only=True`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron.core.collectives import gather_objects
from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.data_files import DataWriter, SummedFiles, item_bytes, one_checksum
from megatron.core.dist_checkpointing.dcp_index import MALFORMED, IndexReader
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import Sums, write_manifest, write_summed
from megatron.core.dist_checkpointing.path_kind import LATEST, METADATA, checkpoint_folder
from megatron.core.dist_checkpointing.pickle_errors import why_refused
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.core.parallel_state import Axis

T = TypeVar("T")
Folder = TypeVar("Folder", bound=PurePath)


class MismatchError(ValueError):
    """Raised if the tensors in a checkpoint do not match the tensors of the run."""

    def __init__(self, text: str, keys: Sequence[str]) -> None:
        super().__init__(text)
        self.keys = keys
        """Names of the tensors that do not match."""


class CheckpointError(RuntimeError):
    """Raised if a checkpoint could not be written or read, for example because a disk is full, a file is missing or a
    rank was lost."""


Writer = type[DataWriter]


def save(
    root: Folder,
    iteration: int,
    tensors: StateDict,
    payload: dict[str, object],
    world: Axis,
    writer: Writer = DataWriter,
    check: Callable[[], None] = lambda: None,
) -> Folder:
    """Save a checkpoint and make it the latest. All ranks of `world` must call this function.

    Args:
        root: folder of the run's checkpoints.
        iteration: number of completed iterations.
        tensors: this rank's boxes (rectangular blocks) of each tensor, keyed by tensor name.
        payload: values to store as JSON, the same on all ranks.
        world: all ranks that save.
        writer: class that writes the files of this rank.
        check: function that raises OSError if this run must not write to `root` now. The first rank calls `check`
            before it changes anything in `root`, and again before the checkpoint is published.

    Returns:
        The folder of the checkpoint. The checkpoint is complete on disk when this function returns on any rank.

    Raises:
        CheckpointError: The checkpoint could not be saved. All live ranks raise this error. The files that
            the failed save wrote are deleted, and the previous checkpoint remains the latest.
    """
    try:
        on_first_rank(check, world)
    except CheckpointError as error:
        raise CheckpointError(f"cannot write checkpoint {checkpoint_folder(root, iteration)}: {error}") from error
    try:
        return _save(root, iteration, tensors, payload, world, writer, check)
    except CheckpointError as error:
        if world.first:
            with suppress(OSError):
                storage_of(root).discard(checkpoint_folder(root, iteration))
        if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):
            raise CheckpointError(f"{error}; {_space(root, tensors, world)}") from error.__cause__
        raise


def _space(root: PurePath, tensors: StateDict, world: Axis) -> str:
    """Return a text that states how much disk space a checkpoint needs and how much is free. All ranks of `world` must
    call this function."""
    boxes = {key: tensor for key, tensor in tensors.items() if isinstance(tensor, ShardedBoxes)}
    items = [item for key, tensor in boxes.items() for item in tensor.__create_write_items__(key, None)]
    needed = sum(gather_objects(sum(map(item_bytes, items)), world))
    if not isinstance(root, Path):
        return f"it takes {needed:,} bytes"
    free = on_first_rank(lambda: shutil.disk_usage(root).free, world)
    return f"it takes {needed:,} bytes, and {free:,} bytes are free in {root}"


def _save(
    root: Folder,
    iteration: int,
    tensors: StateDict,
    payload: dict[str, object],
    world: Axis,
    kind: Writer,
    check: Callable[[], None],
) -> Folder:
    final, storage = checkpoint_folder(root, iteration), storage_of(root)

    def begin() -> PurePath:
        storage.begin(final)
        return storage.scratch(final)

    scratch = on_first_rank(begin, world)
    writer, files = kind(scratch), SummedFiles()
    writer.fs = files
    with _failures_as_checkpoint_error(f"cannot write checkpoint {scratch}"), one_checksum():
        dcp.save(
            _nonempty(tensors),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=world.group,
            no_dist=world.size == 1,
        )
    sums = {name: entry for part in gather_objects(files.sums, world) for name, entry in part.items()}

    def publish() -> None:
        latest = storage.content(root / LATEST)
        check()
        _publish(root, iteration, payload, sums)
        # `replace` raises FileExistsError if another run has changed the file since `latest` was read.
        storage.replace(root / LATEST, str(iteration).encode(), latest)

    on_first_rank(publish, world)
    return final


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a tensor in a checkpoint, and the number of boxes (rectangular blocks) in which it is
    stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


class Checkpoint:
    """An opened checkpoint. The constructor raises ValueError if `folder` does not contain a complete checkpoint."""

    def __init__(self, folder: PurePath) -> None:
        self.folder = folder
        try:
            self.payload: dict[str, Any] = parse_json(storage_of(folder).read(folder / METADATA).decode())
            if not isinstance(self.payload, dict):
                raise TypeError(f"{METADATA} holds a {type(self.payload).__name__}")
            self._reader = IndexReader(folder)
            entries = self._reader.read_metadata().state_dict_metadata.items()
            found = {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}
            self.tensors = {
                key: TensorInfo(tuple(entry.size), entry.properties.dtype, len(entry.chunks))
                for key, entry in found.items()
            }
            covered = {key: sum(prod(chunk.sizes) for chunk in entry.chunks) for key, entry in found.items()}
        except (OSError, *MALFORMED) as error:
            raise ValueError(f"{folder} is not a readable checkpoint: {type(error).__name__}: {error}") from error
        self._holes = [key for key, info in self.tensors.items() if covered[key] != info.numel]

    def load(self, targets: StateDict, world: Axis, ignore: Callable[[str], bool] = lambda key: False) -> None:
        """Load the checkpoint into `targets`. All ranks of `world` must call this method.

        The method raises ValueError on every rank, with the keys in the message, in three cases: a target is missing
        from the checkpoint or has a different shape there; the checkpoint contains a key that no rank loads, and
        `ignore` returns False for this key; or a file is damaged.
        """
        targets = _nonempty(targets)
        self._check(targets, world, ignore)
        with _failures_as_checkpoint_error(f"cannot load checkpoint {self.folder}", reads=True):
            dcp.load(
                dict(targets),
                storage_reader=self._reader,
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=world.group,
                no_dist=world.size == 1,
            )

    def read(self, key: str, first: int | None = None) -> Tensor:
        """Read one whole tensor on this rank alone. If `first` is given, read only index `first` of the tensor's first
        dim."""
        info = self.tensors[key]
        offset, shape = (0,) * len(info.shape), info.shape
        if first is not None:
            offset, shape = (first, *offset[1:]), (1, *shape[1:])
        tensor = torch.empty(shape, dtype=info.dtype)
        self.load({key: ShardedBoxes(info.shape, [(offset, tensor)])}, Axis(), ignore=lambda _: True)
        return tensor if first is None else tensor[0]

    @property
    def index(self) -> Metadata:
        """The checkpoint's index as DCP reads it. The index may contain entries that another program wrote."""
        return self._reader.read_metadata()

    def _check(self, targets: StateDict, world: Axis, ignore: Callable[[str], bool]) -> None:
        wanted: dict[str, tuple[int, ...]] = {}
        for part in gather_objects({key: tuple(target.shape) for key, target in targets.items()}, world):
            wanted |= part
        reshaped = [key for key, shape in wanted.items() if key in self.tensors and self.tensors[key].shape != shape]
        problems = {
            "missing from the checkpoint": [key for key in wanted if key not in self.tensors],
            "in the checkpoint but not in the run": [
                key for key in self.tensors if key not in wanted and not ignore(key)
            ],
            "of another shape": reshaped,
            "incomplete in the checkpoint": [key for key in self._holes if key in wanted],
        }
        shown = {
            key: f"{key} {self.tensors[key].shape} in the checkpoint, {wanted[key]} in the run" for key in reshaped
        }
        lines = [
            f"{len(keys)} {what}: {_few([shown.get(key, key) for key in sorted(keys)])}"
            for what, keys in problems.items()
            if keys
        ]
        if lines:
            text = f"checkpoint {self.folder} does not fit the run: " + "; ".join(lines)
            raise MismatchError(text, [key for keys in problems.values() for key in keys])


def open_checkpoint(folder: PurePath, world: Axis) -> Checkpoint:
    """Open a checkpoint on every rank. A failure on one rank is raised on all ranks."""
    checkpoint, problem = _attempt(lambda: Checkpoint(folder))
    _raise_first(gather_objects(problem, world))
    assert checkpoint is not None
    return checkpoint


def on_first_rank(fn: Callable[[], T], world: Axis) -> T:
    """Run `fn` on the first rank only, and return its result on all ranks. If `fn` fails, all ranks raise the error."""
    outcome: list[Any] = list(_attempt(fn)) if world.first else [None, None]
    if world.size > 1:
        dist.broadcast_object_list(outcome, src=world.ranks[0], group=world.group)
    result, problem = outcome
    _raise_first([problem])
    return result


Problem = tuple[bool, str]
"""Pair (is_user_error, message). User errors raise ValueError, and all other errors raise CheckpointError."""


def _attempt(fn: Callable[[], T]) -> tuple[T | None, Problem | None]:
    try:
        return fn(), None
    except (OSError, ValueError) as error:
        return None, (isinstance(error, ValueError), str(error))


def _raise_first(problems: list[Problem | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            users, message = problem
            message = f"{message} (on rank {rank} of {len(problems)})" if len(problems) > 1 else message
            raise ValueError(message) if users else CheckpointError(message)


def _publish(root: PurePath, iteration: int, payload: dict[str, object], sums: Sums) -> None:
    """Write the metadata and the manifest of a checkpoint, and publish its folder."""
    final, storage = checkpoint_folder(root, iteration), storage_of(root)
    scratch = storage.scratch(final)
    metadata = write_summed(scratch / METADATA, json.dumps(payload, indent=1))
    write_manifest(scratch, sums | {METADATA: metadata})
    storage.publish(final)


def _nonempty(tensors: StateDict) -> StateDict:
    """Remove tensors without elements, which need not be saved or loaded."""
    return {key: tensor for key, tensor in tensors.items() if not isinstance(tensor, Tensor) or tensor.numel()}


def ranks_without(seen: bool, world: Axis) -> str:
    """Return the ranks for which `seen` is False, with their hosts: `ranks 2, 3 (on host1)`; empty if there are none.
    All ranks of `world` must call this function.
    """
    found = gather_objects((seen, socket.gethostname()), world)
    ranks = [rank for rank, (sees, _) in enumerate(found) if not sees]
    names = list(dict.fromkeys(found[rank][1] for rank in ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {_few(ranks)} (on {_few(names)})" if ranks else ""


def _few(names: Sequence[object]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(map(str, names[:8])) + more


@contextmanager
def _failures_as_checkpoint_error(what: str, *, reads: bool = False) -> Iterator[None]:
    """Convert DCP's exception to a CheckpointError with the cause on the first failed rank. If `reads` is True, a
    damaged checkpoint file raises ValueError instead of CheckpointError.

    If any rank fails, DCP raises an exception on all ranks: a BaseException that contains the failures of all ranks.
    DCP's warning that torch.distributed is disabled is silenced, because a single process may also save and load
    checkpoints.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        told = f"{what}: on rank {rank}: {type(cause).__name__}: {why_refused(cause)}"
        if reads and _is_of_content(cause):
            raise ValueError(f"{told.rstrip(': ')}; restore it from a copy, or name another checkpoint") from None
        raise CheckpointError(told) from cause


def _is_of_content(error: BaseException) -> bool:
    """Return whether an error means that a checkpoint's file is damaged or forged.

    An error of this kind can occur even if the check of the manifest found no problem.
    """
    malformed = isinstance(error, MALFORMED) and not isinstance(error, MemoryError)
    return malformed or (isinstance(error, RuntimeError) and "PytorchStreamReader" in str(error))
