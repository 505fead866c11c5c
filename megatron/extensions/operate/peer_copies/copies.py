"""Copies of a rank's state after a step. The state is first copied to the memory of the rank's own host. A thread then
sends the copy to other hosts. The copies of a step are valid after all ranks have reported in the store that their
copies are complete. Each part of the state has two files, called slots: one for the copy of the previous step, which
remains until all ranks have reported, and one for the copy in progress.

The store has these keys:

    `copied/COPY`: number of ranks that have stored and sent their parts.
    `failed/COPY`: reason why a rank failed to store or send a part.
    `copied-by/RANK`: COPY number of the last copy that a rank has stored and sent.
    `holder/HOST`: address of a restarted holder.

COPY counts the copied steps since the ranks were started. COPY differs from the iteration, because a run may return to
an earlier iteration and copy the same iteration twice.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.extensions.operate.peer_copies.client import (
    Address,
    Link,
    Pace,
    RefusedError,
    opened,
    reached,
)
from megatron.extensions.operate.peer_copies.holder import header_of, sealed, write_whole
from megatron.extensions.operate.peer_copies.shards import Entry, Slot, Stored, boxes_of, entries_of

AGAIN = 10.0
"""Maximum time in seconds that ranks wait for a restarted holder process (`holder`) to answer. Ranks do not wait if the
previous copies also failed."""

MOST_PASSED_OVER = 31
"""Maximum number of copies that are skipped after a failed copy."""


class Backoff:
    """Rule that skips some copies after failed copies, so that a permanent fault does not slow down every step. All
    ranks count the same failures, and therefore skip the same copies."""

    def __init__(self) -> None:
        self.failures = 0
        """Number of consecutive failures."""

        self._pass_over = 0

    def is_due(self) -> bool:
        """Return True if the next copy should be attempted. Call this method once before each copy."""
        self._pass_over -= 1
        return self._pass_over < 0

    def failed(self) -> None:
        """Count a failure. The number of copies that are skipped next depends on the number of consecutive failures: 0
        copies after the first failure, 1 after the second, then 3, 7, and so on, up to `MOST_PASSED_OVER`."""
        self._pass_over = min(2**self.failures - 1, MOST_PASSED_OVER)
        self.failures += 1

    def succeeded(self) -> None:
        """Set the number of consecutive failures to 0, so that no copy is skipped."""
        self.failures = self._pass_over = 0


@dataclass(frozen=True)
class Duty:
    """Part of the training state that this rank stores on its own host. `to` contains the hosts to which the rank also
    sends the part."""

    stored: Stored
    to: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Destinations of this rank's copies: a folder on this host, and the holder processes of all hosts."""

    folder: Path
    """Folder of the run's copies on this host."""

    generation: str
    holders: Mapping[str, Address]
    """Maps hosts to the addresses of their holder processes."""

    own: str
    """Name of this host."""

    keep: float
    """Number of seconds for which a holder process keeps running after the ranks have ended."""

    leads: bool
    """True if this rank supervises the holder process of its host."""

    rank: int


class Copies:
    """Copies of one rank's state. On every rank, the training thread calls `copy` every --peer-copy-interval steps, and
    after the run was rolled back to an earlier state."""

    def __init__(self, place: Place, duties: Sequence[Duty], store: dist.Store, world: int, pace: Pace) -> None:
        self.place, self.duties = place, duties
        self.complete: int | None = None
        """Last iteration for which all ranks have completed their copies; None if there is none."""

        self.failure = ""
        """Reason why the copies of the last step are incomplete; empty if the copies are complete."""

        self._store, self._world = store, world
        self._pace = pace
        self._backoff = Backoff()
        self._told = set[str]()
        """Reasons for incomplete copies that were already logged. Numbers are removed from the reasons before they are
        compared."""

        self._slot, self._number = 0, 0
        self._slots = dict[tuple[str, int], Slot]()
        self._entries = dict[str, tuple[list[Entry], str]]()
        self._thread: threading.Thread | None = None
        self._first: Callable[[], None] | None = None
        self._lease: Link | None = None

    def when_complete(self, call: Callable[[], None]) -> None:
        """Register a function. The thread that sends copies calls this function once, when the first copies are
        complete."""
        self._first = call

    def news(self) -> str:
        """Return a log line if copies failed for a new reason or succeeded again. Otherwise, return an empty string."""
        reason = re.sub(r"\d+", "", self.failure)
        if reason and reason not in self._told:
            self._told.add(reason)
            then = "the previous copies are kept, and copying is attempted less often after repeated failures"
            return f"copies in memory of the last step are incomplete: {self.failure}; {then}"
        if self._told and not reason:
            self._told.clear()
            return f"copies in memory are complete again, for iteration {self.complete}"
        return ""

    def holders(self) -> dict[str, Address]:
        """Return the current address of each host's holder process, keyed by host."""
        return {host: self._address(host) or address for host, address in self.place.holders.items()}

    def wait(self, seconds: float = inf) -> list[int]:
        """Wait, for at most `seconds`, until the copies in progress are complete on all ranks or have failed. Return
        the ranks whose copies are still in progress."""
        if self._thread is not None:
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))
            if self._thread.is_alive():
                keys = {rank: f"copied-by/{rank}" for rank in range(self._world)}
                now = {rank: self._store.check([key]) and int(self._store.get(key)) for rank, key in keys.items()}
                return [rank for rank, number in now.items() if number < self._number]
            self._thread = None
        return []

    def copy(self, iteration: int, tensors: StateDict, payload: Mapping[str, object] | None) -> None:
        """Wait for the copies of the previous step, and start to copy the state of a step. When this method returns,
        kernels that are launched on the current stream may change `tensors`."""
        self.wait()
        if not self._backoff.is_due():
            return
        self._number += 1
        staged, problem = list[tuple[Duty, Slot]](), ""
        try:
            staged += [(duty, self._stage(duty.stored, tensors)) for duty in self.duties]
        except OSError as error:  # for example, the memory is full; training continues without this copy
            problem = f"{self.place.own}: {type(error).__name__}: {error}"
        devices = {data.device for tensor in tensors.values() for _, data in tensor.boxes if data.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        send = partial(self._send, iteration, staged, events, payload, problem)
        self._thread = threading.Thread(target=send, name="peer copies", daemon=True)
        self._thread.start()

    def _stage(self, stored: Stored, tensors: StateDict) -> Slot:
        entries = entries_of(stored, tensors)
        if stored.name not in self._entries:
            self._entries[stored.name] = entries, json.dumps([entry.record for entry in entries])
        assert entries == self._entries[stored.name][0], f"the state of part {stored.name} has changed its shape"
        path = self.place.folder / self.place.generation / f"{stored.name}.{self._slot}"
        header_of(path).unlink(missing_ok=True)
        key = stored.name, self._slot
        if key not in self._slots:
            cuda = any(data.is_cuda for name in stored.keys for _, data in tensors[name].boxes)
            self._slots[key] = Slot(path, stored.part.nbytes, pin=cuda)
        boxes = (data for name in stored.keys for data in boxes_of(tensors, name).values())
        self._slots[key].stage(entries, boxes)
        return self._slots[key]

    def _send(
        self,
        iteration: int,
        staged: Sequence[tuple[Duty, Slot]],
        events: Sequence[torch.cuda.Event],
        payload: Mapping[str, object] | None,
        problem: str,
    ) -> None:
        """Send the copies of a step to other hosts, and report in the store that this rank has finished. If the state
        could not be copied to this host's memory, `problem` is the reason, and only the failure is reported."""
        try:
            if problem:
                raise OSError(problem)
            for event in events:
                event.synchronize()
            self._look_after_holder()
            for duty, slot in staged:
                header = self._header(duty.stored, slot, iteration, payload)
                write_whole(header_of(slot.path), header)
                for host in duty.to:
                    self._put(host, slot, header)
            self._store.set(f"copied-by/{self.place.rank}", str(self._number))
            self._store.add(f"copied/{self._number}", 1)
        except Exception as error:
            with suppress(RuntimeError):  # ignored: the store no longer exists if the run has ended
                why = problem or f"{self.place.own}: {type(error).__name__}: {error}"
                self._store.set(f"failed/{self._number}", why)
        with suppress(RuntimeError):
            self._agree(iteration)

    def _agree(self, iteration: int) -> None:
        """Wait until all ranks have completed their copies, or a rank has reported a failure."""
        pause, longest = 0.001, min(0.1, 0.01 + 1e-4 * self._world)
        while self._store.add(f"copied/{self._number}", 0) < self._world:
            if self._store.check([failed := f"failed/{self._number}"]):
                self.failure = self._store.get(failed).decode()
                self._backoff.failed()
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if self.place.rank == 0 and self.complete is not None:  # no rank reads the previous key any more
            self._store.delete_key(f"copied/{self._number - 1}")
        self.complete, self.failure = iteration, ""
        self._backoff.succeeded()
        self._slot = 1 - self._slot
        if self._first is not None:
            self._first()
            self._first = None

    def _header(self, stored: Stored, slot: Slot, iteration: int, payload: Mapping[str, object] | None) -> bytes:
        entries, text = self._entries[stored.name]
        rest: dict[str, Any] = {"iteration": iteration, "part": stored.name, "nbytes": stored.part.nbytes}
        rest["number"] = self._number
        rest |= {"sums": slot.sums(entries), "payload": payload if stored is self.duties[0].stored else None}
        return sealed(f'{json.dumps(rest)[:-1]}, "entries": {text}}}'.encode())

    def _put(self, host: str, slot: Slot, header: bytes) -> None:
        again, address = 0.0 if self._backoff.failures else AGAIN, self.place.holders[host]
        limit = time.monotonic() + again
        while True:
            try:
                link = reached(self._address(host) or address)
                try:
                    return link.put(self.place.generation, slot.path.name, header, slot.view, self._pace)
                finally:
                    link.close()
            except OSError as error:
                if isinstance(error, RefusedError) or time.monotonic() > limit:
                    raise
                time.sleep(0.2)

    def _address(self, host: str) -> Address | None:
        key = f"holder/{host}"
        return Address(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _look_after_holder(self) -> None:
        """Restart the holder process of this host if it has ended or does not answer."""
        if not self.place.leads:
            return
        own = self._address(self.place.own) or self.place.holders[self.place.own]
        try:
            reached(own).close()
        except OSError:
            found, self._lease = opened(self.place.folder, self.place.keep)
            self._store.set(f"holder/{self.place.own}", json.dumps(asdict(found)))
