"""Copies of a rank's state after a step. The state is immediately staged in the host's memory. A thread then sends the
state to other hosts.

The copies of a step are valid once all ranks have completed their copies. Ranks report the completion through the
store. Until all ranks have reported it, the copies of the previous step remain in the other slot of each part.

The store has these keys:

    copied/COPY       number of ranks that have stored and sent their parts
    failed/COPY       reason why a rank failed to store or send a part
    copied-by/RANK    number of the last copy of a rank
    holder/HOST       address of a restarted holder

COPY is the number of the copy in this start. COPY is not the iteration, because a run may go back to an iteration and
copy this iteration again.
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
"""Maximum time in seconds that ranks wait for a restarted holder. Ranks do not wait if the previous copies also
failed."""

MOST_PASSED_OVER = 31
"""Maximum number of consecutive copies that the backoff skips after failed copies."""


class Backoff:
    """Backoff after failed copies, so that a permanent fault does not slow down every step. All ranks count the same
    failures."""

    def __init__(self) -> None:
        self.failures = 0
        """Number of consecutive failures."""

        self._pass_over = 0

    def is_due(self) -> bool:
        """Return True if the next copy should be attempted. Call this method once for each copy."""
        self._pass_over -= 1
        return self._pass_over < 0

    def failed(self) -> None:
        """Count a failure. After consecutive failures, 0, 1, 3, 7, ... copies are skipped."""
        self._pass_over = min(2**self.failures - 1, MOST_PASSED_OVER)
        self.failures += 1

    def succeeded(self) -> None:
        """Reset the count of failures, so that every copy is attempted again."""
        self.failures = self._pass_over = 0


@dataclass(frozen=True)
class Duty:
    """Part that this rank stores on its host, and the hosts to which the rank sends the part."""

    stored: Stored
    to: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Local folder and holders for the copies of one generation."""

    folder: Path
    """Folder of the run's copies on this host."""

    generation: str
    holders: Mapping[str, Address]
    """Maps hosts to the addresses of their holders."""

    own: str
    """Name of this host."""

    keep: float
    """Number of seconds that a holder outlives the ranks."""

    leads: bool
    """True if this rank supervises the holder of its host."""

    rank: int


class Copies:
    """Copies of one rank's state. The training thread of every rank calls `copy` once for each copied step."""

    def __init__(self, place: Place, duties: Sequence[Duty], store: dist.Store, world: int, pace: Pace) -> None:
        self.place, self.duties = place, duties
        self.complete: int | None = None
        """Last iteration for which all ranks have completed their copies."""

        self.failure = ""
        """Reason why the copies of the last step are incomplete; empty if they are complete."""

        self._store, self._world = store, world
        self._pace = pace
        self._backoff = Backoff()
        self._told = set[str]()
        """Logged reasons for incomplete copies, with numbers removed."""

        self._slot, self._number = 0, 0
        self._slots = dict[tuple[str, int], Slot]()
        self._entries = dict[str, tuple[list[Entry], str]]()
        self._thread: threading.Thread | None = None
        self._first: Callable[[], None] | None = None
        self._lease: Link | None = None

    def when_complete(self, call: Callable[[], None]) -> None:
        """Register a function that the copying thread calls once, as soon as the first copies are complete."""
        self._first = call

    def news(self) -> str:
        """Return a log line if copies failed for a new reason or succeeded again. Otherwise, return an empty string."""
        reason = re.sub(r"\d+", "", self.failure)
        if reason and reason not in self._told:
            self._told.add(reason)
            then = "the previous copies remain, and repeated failures make attempts rarer"
            return f"copies in memory of the last step are incomplete: {self.failure}; {then}"
        if self._told and not reason:
            self._told.clear()
            return f"copies in memory are complete again, for iteration {self.complete}"
        return ""

    def holders(self) -> dict[str, Address]:
        """Return a mapping from hosts to the current addresses of their holders."""
        return {host: self._address(host) or address for host, address in self.place.holders.items()}

    def wait(self, seconds: float = inf) -> list[int]:
        """Wait until the copies in progress are complete on all ranks, or have failed. After a timeout of `seconds`,
        returns the ranks whose copies are incomplete."""
        if self._thread is not None:
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))
            if self._thread.is_alive():
                keys = {rank: f"copied-by/{rank}" for rank in range(self._world)}
                now = {rank: self._store.check([key]) and int(self._store.get(key)) for rank, key in keys.items()}
                return [rank for rank, number in now.items() if number < self._number]
            self._thread = None
        return []

    def copy(self, iteration: int, tensors: StateDict, payload: Mapping[str, object] | None) -> None:
        """Wait until the copies of the previous step have ended, and start to copy the state of a step. After this
        method returns, work that is enqueued on the current stream may change `tensors`."""
        self.wait()
        if not self._backoff.is_due():
            return
        self._number += 1
        staged, problem = list[tuple[Duty, Slot]](), ""
        try:
            staged += [(duty, self._stage(duty.stored, tensors)) for duty in self.duties]
        except OSError as error:  # training continues without copies, for example if memory is full
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
        """Complete the copies of a step. If the copies could not be staged, `problem` is the reason."""
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
            with suppress(RuntimeError):  # the store has ended together with the run
                why = problem or f"{self.place.own}: {type(error).__name__}: {error}"
                self._store.set(f"failed/{self._number}", why)
        with suppress(RuntimeError):
            self._agree(iteration)

    def _agree(self, iteration: int) -> None:
        """Wait until all ranks have completed their copies."""
        pause, longest = 0.001, min(0.1, 0.01 + 1e-4 * self._world)
        while self._store.add(f"copied/{self._number}", 0) < self._world:
            if self._store.check([failed := f"failed/{self._number}"]):
                self.failure = self._store.get(failed).decode()
                self._backoff.failed()
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if self.place.rank == 0 and self.complete is not None:  # all ranks have read the previous key
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
        """Restart the holder of this host if it has ended or does not answer."""
        if not self.place.leads:
            return
        own = self._address(self.place.own) or self.place.holders[self.place.own]
        try:
            reached(own).close()
        except OSError:
            found, self._lease = opened(self.place.folder, self.place.keep)
            self._store.set(f"holder/{self.place.own}", json.dumps(asdict(found)))
