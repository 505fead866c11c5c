"""Asynchronous checkpoint saves. The writer stages state in host memory, writes it on a thread, retries after errors,
reports results and deletes old checkpoints.

A save blocks training only for the copy to host memory. DCP then writes the copy on a thread, over a gloo group that
training never uses. If `storage.save` fails, every rank raises the same error, so that all ranks retry together. A
failed save never changes earlier checkpoints. If another run has saved a later iteration since this run started, this
run does not overwrite the latest-checkpoint file with an earlier iteration.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import PurePath

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.dist_checkpointing.path_kind import LATEST, latest_text
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.core.dist_checkpointing.storage import CheckpointError, on_first_rank, save
from megatron.core.parallel_state import Axis

Cleanup = Callable[[PurePath, int, Collection[PurePath]], None]


@dataclass(frozen=True)
class SaveReport:
    """Result of one attempt to save a checkpoint. All fields except `seconds` have the same value on every rank."""

    iteration: int
    seconds: float
    """Time in seconds since `CheckpointWriter.save` was called."""

    error: str | None = None
    attempts_left: int = 0
    complete: bool = True
    """True if the checkpoint was written. If `error` is also set, only the deletion of old checkpoints failed."""


class CheckpointWriter:
    """Writer of checkpoints in the folder `root`. All ranks must call the same methods in the same order."""

    attempts = 3
    pause = 2.0
    """Pause in seconds after a failed attempt to save."""

    def __init__(
        self, root: PurePath, world: Axis, *, background: bool = True, cleanups: Sequence[Cleanup] = ()
    ) -> None:
        """Create a writer.

        Args:
            root: Folder of the run's checkpoints.
            world: Axis of all ranks that save.
            background: Whether to write on a thread instead of within `save`.
            cleanups: Functions that delete older checkpoints. After each save, one rank calls these functions. Each
                function receives `root`, the saved iteration, and the list `held` of checkpoints to keep, such as the
                checkpoint from which the run was loaded. The functions may raise OSError.
        """
        self.root, self.background = root, background
        self.cleanups, self.held = cleanups, list[PurePath]()
        self.check: Callable[[], None] = lambda: None
        self._own_latest = {latest_text(root)}
        """Contents of the latest-checkpoint file that this run has read or written: the content at the start of the
        run, and every later content that the run itself wrote. If the file has any other content, another run has saved
        to the same folder."""
        self._world = world
        if world.size > 1:  # A separate group is needed, because two threads must not share a group.
            self._world = replace(world, group=dist.new_group(list(world.ranks), backend="gloo"))
        self._staging = HostStaging()
        self._reports: queue.SimpleQueue[SaveReport] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None

    def prepare(self, tensors: StateDict) -> None:
        """Allocate the staging memory in the background. If this method is not called, the first save allocates the
        memory."""
        if self.background:
            self._staging.prepare(tensors)

    def save(self, iteration: int, tensors: StateDict, payload: dict[str, object]) -> None:
        """Wait for the previous save and start a new save. A foreground save is complete when this method returns.

        `tensors` may change once this method returns. `payload` is written as JSON, and the caller must not modify it
        afterwards.
        """
        began = time.perf_counter()
        self.wait()
        if not self.background:
            self._save(began, iteration, tensors, payload)
            return
        staged = self._staging.stage(tensors)
        # A daemon thread does not delay the exit of a failing process. Before a normal exit, the process calls wait().
        self._thread = threading.Thread(
            target=self._guarded, args=(began, iteration, staged, payload), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait for the current save and for the allocation of staging memory."""
        self._staging.wait()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._crash is not None:
            raise self._crash

    def close(self) -> None:
        """Wait for the current save and free the staging memory."""
        self.wait()
        self._staging.release()

    def reports(self) -> list[SaveReport]:
        """Return reports of the attempts that ended since the last call, without waiting for running attempts. If an
        exception ended the writer's thread, this method raises the exception."""
        if self._crash is not None:
            raise self._crash
        found = []
        while not self._reports.empty():
            found.append(self._reports.get())
        return found

    def _guarded(self, began: float, iteration: int, tensors: StateDict, payload: dict[str, object]) -> None:
        try:
            self._save(began, iteration, tensors, payload)
        except BaseException as error:
            self._crash = error

    def _save(self, began: float, iteration: int, tensors: StateDict, payload: dict[str, object]) -> None:
        def report(error: str | None = None, left: int = 0, complete: bool = True) -> None:
            seconds = time.perf_counter() - began
            self._reports.put(SaveReport(iteration, seconds, error, left, complete))

        check = partial(self._check_writable, iteration)
        for left in range(self.attempts - 1, -1, -1):
            if problem := _failure(partial(save, self.root, iteration, tensors, payload, self._world, check=check)):
                report(problem, left, complete=False)
                time.sleep(self.pause if left else 0)
                continue
            report(_failure(partial(on_first_rank, partial(self._clean, iteration), self._world)))
            return

    def _check_writable(self, iteration: int) -> None:
        """Raise OSError if this run must not write to `root`, or if another run has saved a later iteration there."""
        self.check()
        latest = latest_text(self.root)
        is_number = latest.isascii() and latest.isdigit() and len(latest) <= 18
        if is_number and latest not in self._own_latest and int(latest) > iteration:
            raise OSError(
                f"{self.root / LATEST} names iteration {latest}, which this run has not saved: another run has "
                "saved to this folder since this run started. Stop one of the two runs, or use different --save folders"
            )
        self._own_latest.add(str(iteration))

    def _clean(self, newest: int) -> None:
        for cleanup in self.cleanups:
            cleanup(self.root, newest, self.held)


def _failure(fn: Callable[[], object]) -> str | None:
    """Run `fn`. If `fn` raises CheckpointError, return its message, which is the same on every rank. Otherwise, return
    None."""
    try:
        fn()
    except CheckpointError as error:
        return str(error)
    return None


ALIGNMENT = 64


class HostStaging:
    """Host buffer for all tensors that this rank writes to a checkpoint. The buffer is reused for all saves, and is
    pinned if the state is on a GPU. The buffer is allocated as pageable memory and pinned afterwards, because torch's
    allocator for pinned memory rounds sizes up to a power of two.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], None] = lambda: None
        self._preparing: threading.Thread | None = None

    def prepare(self, tensors: StateDict) -> None:
        """Allocate the host buffer on a thread, so that the first save does not wait for the allocation. Allocating the
        buffer takes longer than copying the tensors to it."""
        every = [data for found in _written(tensors).values() for data in found.values()]
        device = next((data.device for data in every if data.is_cuda), None)

        def take() -> None:
            if device is not None:
                torch.cuda.set_device(device)  # Pinning applies to the current device of the thread.
            self._reserve(sum(map(_padded, every)), pin=device is not None)
            self._buffer.zero_()

        self._preparing = threading.Thread(target=take, name="staging", daemon=True)
        self._preparing.start()

    def stage(self, tensors: StateDict) -> StateDict:
        """Copy into the host buffer everything that this rank writes, and wait only for these copies. The returned
        tensors refer to the host buffer, which the next call of `stage` overwrites."""
        self.wait()
        boxes = _written(tensors)
        every = [data for found in boxes.values() for data in found.values()]
        devices = {data.device for data in every if data.is_cuda}
        self._reserve(sum(map(_padded, every)), pin=bool(devices))
        staged, at = {}, 0
        for key, found in boxes.items():
            copies = []
            for offset, data in found.items():
                copy = self._buffer[at : at + data.nbytes].view(data.dtype).view(data.shape)
                copy.copy_(data, non_blocking=True)
                copies.append((offset, copy))
                at += _padded(data)
            staged[key] = ShardedBoxes(tensors[key].shape, copies)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def _reserve(self, size: int, pin: bool) -> None:
        if size <= self._buffer.numel():
            return
        self._free()
        self._buffer = torch.empty(size, dtype=torch.uint8)
        if pin:
            cudart, address = torch.cuda.cudart(), self._buffer.data_ptr()
            # if the buffer cannot be pinned, it stays pageable, which is slower but correct
            if int(cudart.cudaHostRegister(address, size, 0)) == 0:
                self._unpin = lambda: cudart.cudaHostUnregister(address)

    def release(self) -> None:
        """Free the buffer."""
        self.wait()
        self._free()

    def wait(self) -> None:
        """Wait for the allocation that `prepare` started."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def _free(self) -> None:
        self._unpin()
        self._unpin = lambda: None
        self._buffer = torch.empty(0, dtype=torch.uint8)


def _written(tensors: StateDict) -> dict[str, dict[tuple[int, ...], Tensor]]:
    """Return the boxes (rectangular blocks of tensors) that this rank writes. The result maps the key of each tensor to
    a dictionary {offset of the box: data}. If several boxes are equal, only the first box is kept."""
    return {key: dict(reversed(tensor.boxes)) for key, tensor in tensors.items() if tensor.writes and tensor.boxes}


def _padded(data: Tensor) -> int:
    return -(-data.nbytes // ALIGNMENT) * ALIGNMENT
