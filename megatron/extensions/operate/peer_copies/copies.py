"""Copies of a rank's state after a step: staged into its host's memory immediately, and sent to other hosts in a
thread.

A copy counts when all ranks have completed theirs for the step, on which they agree through the store. Until then the
copies of the previous step remain, in the other slot of each part.

Keys of the store. They number the copies of this start, because a run may go back to an iteration and copy it again:
copied/COPY, the number of ranks that have stored and sent theirs; failed/COPY, why a rank could not; copied-by/RANK,
the last copy of a rank; holder/HOST, the address of a holder that was restarted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.state_dict import StateDict
from megatron.extensions.operate.peer_copies.client import Address, Link, Pace, leased, open_holder
from megatron.extensions.operate.peer_copies.holder import header_of, sealed, write_whole
from megatron.extensions.operate.peer_copies.shards import Entry, Slot, Stored, boxes_of, entries_of

AGAIN = 20.0
"""Seconds for which ranks look for a restarted holder."""


@dataclass(frozen=True)
class Duty:
    """A part that this rank stores on its host, and the hosts to which it sends the part."""

    stored: Stored
    to: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Locations of the copies of one start of the ranks."""

    folder: Path
    """Folder of the run on this host."""

    generation: str
    holders: Mapping[str, Address]
    """Host -> its holder."""

    own: str
    """Name of this host."""

    keep: float
    """Seconds that a holder outlives the ranks."""

    leads: bool
    """True if this rank supervises the holder of its host."""

    rank: int


class Copies:
    """Copies of one rank. `copy` is called by the training thread, once for a step on all ranks."""

    def __init__(self, place: Place, duties: Sequence[Duty], store: dist.Store, world: int, pace: Pace) -> None:
        self.place, self.duties = place, duties
        self.complete: int | None = None
        """Iteration whose copies are complete on all ranks."""

        self.failure = ""
        """Reason why the copies of the last step are not complete."""

        self._store, self._world = store, world
        self._pace = pace
        self._slot, self._number = 0, 0
        self._slots = dict[tuple[str, int], Slot]()
        self._entries = dict[str, tuple[list[Entry], str]]()
        self._thread: threading.Thread | None = None
        self._first: Callable[[], None] | None = None
        self._lease: Link | None = None

    def when_complete(self, call: Callable[[], None]) -> None:
        """Register `call`, which the copying thread calls once, when the first copies are complete."""
        self._first = call

    def wait(self, seconds: float = inf) -> list[int]:
        """Wait until the copies in progress are complete on all ranks, or have failed. After the given number of
        seconds, returns the ranks whose copies are incomplete."""
        if self._thread is not None:
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))
            if self._thread.is_alive():
                keys = {rank: f"copied-by/{rank}" for rank in range(self._world)}
                now = {rank: self._store.check([key]) and int(self._store.get(key)) for rank, key in keys.items()}
                return [rank for rank, number in now.items() if number < self._number]
            self._thread = None
        return []

    def copy(self, iteration: int, tensors: StateDict, payload: Mapping[str, object] | None) -> None:
        """Begin the copies of a step, after the previous ones have ended. `tensors` may change once this returns, on
        the current stream."""
        self.wait()
        self._number += 1
        staged = [(duty, self._stage(duty.stored, tensors)) for duty in self.duties]
        devices = {data.device for tensor in tensors.values() for _, data in tensor.boxes if data.is_cuda}
        events = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._thread = threading.Thread(
            target=self._send, args=(iteration, staged, events, payload), name="peer copies", daemon=True
        )
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
    ) -> None:
        try:
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
            with suppress(RuntimeError):  # the store is gone, and so is the run
                self._store.set(f"failed/{self._number}", f"{type(error).__name__}: {error}")
        with suppress(RuntimeError):
            self._agree(iteration)

    def _agree(self, iteration: int) -> None:
        """Wait for the other ranks."""
        pause, longest = 0.001, min(0.1, 0.01 + 1e-4 * self._world)
        while self._store.add(f"copied/{self._number}", 0) < self._world:
            if self._store.check([failed := f"failed/{self._number}"]):
                self.failure = self._store.get(failed).decode()
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
        if self.place.rank == 0 and self.complete is not None:  # all ranks have read it
            self._store.delete_key(f"copied/{self._number - 1}")
        self.complete, self.failure = iteration, ""
        self._slot = 1 - self._slot
        if self._first is not None:
            self._first()
            self._first = None

    def _header(self, stored: Stored, slot: Slot, iteration: int, payload: Mapping[str, object] | None) -> bytes:
        entries, text = self._entries[stored.name]
        rest: dict[str, Any] = {"iteration": iteration, "part": stored.name, "nbytes": stored.part.nbytes}
        rest |= {"sums": slot.sums(entries), "payload": payload if stored is self.duties[0].stored else None}
        return sealed(f'{json.dumps(rest)[:-1]}, "entries": {text}}}'.encode())

    def _put(self, host: str, slot: Slot, header: bytes) -> None:
        limit, address = time.monotonic() + AGAIN, self.place.holders[host]
        while True:
            try:
                link = Link(self._address(host) or address)
                try:
                    return link.put(self.place.generation, slot.path.name, header, slot.view, self._pace)
                finally:
                    link.close()
            except OSError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.2)

    def _address(self, host: str) -> Address | None:
        key = f"holder/{host}"
        return Address(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _look_after_holder(self) -> None:
        """Restart the holder of this host if it has died."""
        if not self.place.leads:
            return
        own = self._address(self.place.own) or self.place.holders[self.place.own]
        try:
            Link(own).close()
        except OSError:
            found = open_holder(self.place.folder, self.place.keep)
            self._lease = leased(found)
            self._store.set(f"holder/{self.place.own}", json.dumps(asdict(found)))
