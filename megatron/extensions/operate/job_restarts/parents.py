"""Messages with which the launcher's processes agree on how to start the ranks again. The messages go through the
rendezvous store. Each process that the launcher starts is called a parent, because it forks the process of a rank.
In `roster`, a parent is called a worker, and is identified by the rank number that the launcher assigns.

The ranks are launched once at the beginning, and again after each failure. Each launch is called a start, and the
starts are numbered from 0. The store has these keys for worker W and start number N:

    `parent/W`: host and process of worker W.
    `beat/W`: heartbeat counter of worker W.
    `again/N`: set if a parent has requested start N.
    `here/N/W`: set if worker W is ready for start N.
    `decides/N`: worker that plans start N.
    `start/N`: plan of start N.
    `over`: exit code of a parent that has ended permanently.
    `left/W`: set if worker W no longer needs the store.
    `offer/N/W`: copies of the training state on the host of worker W, if W has no rank in start N.
    `newest`: number of the newest start.

When the ranks are started again, the keys of the previous start are deleted, including keys that ranks have set. If the
launcher serves a store, as torchrun does, the parents use this store. Otherwise, worker 0 forks a process that serves a
store.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from megatron.extensions.operate.job_restarts.roster import Roster
from megatron.extensions.operate.job_restarts.store_process import StoreProcess
from megatron.extensions.operate.peer_copies.client import host_name
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.child_processes import wait_until_gone
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_store import Peer, identity, launcher_has_store, meet, start_of

STORE = "parents"
"""Prefix of all store keys with which parents exchange messages."""

LOOK = 0.05
"""Seconds between two checks of the child or of the other parents."""

ANSWER = 8.0
"""Maximum time in seconds to wait for an answer from the store."""

ROLL = 15.0
"""Maximum time in seconds to wait until all living parents are ready to start the ranks again."""

PARTING = 5.0
"""Maximum time in seconds that worker 0, which may serve the store, waits for the other workers at the end of the
run."""

OFFERS = 5.0
"""Maximum time in seconds to wait until workers without ranks have reported the copies on their hosts."""

DECIDES = 30.0
"""Maximum time in seconds that a parent may need to plan how to start the ranks, including the search for another
layout. After this time, another parent makes the plan."""

SILENT = 2.5
"""While parents wait for each other before they start the ranks, a parent on another machine is considered lost after
this number of seconds without a heartbeat."""

LOST = 30.0
"""While ranks run, a parent on another machine is considered lost after this number of seconds without a heartbeat."""

LONGEST = 1.0
"""Maximum number of seconds by which a `Clock` advances between two readings. Longer gaps mean that the process was
suspended."""

DELETED = 200
"""Maximum number of old store keys that are deleted in one call."""

KINDS = ("again", "decides", "start", "here", "offer")
"""Prefixes of the store keys that belong to one start (launch) of the ranks. Each of these keys contains the number of
the start, as in `again/N`."""

T = TypeVar("T")


class LostStoreError(ConnectionError):
    """Raised if the store through which the parents exchange messages does not answer."""


class Clock:
    """Clock that measures how many seconds this process has run. On an overloaded machine, processes may be suspended
    for seconds. The clock does not count time during which this process was suspended. Other processes were possibly
    suspended as well, and must not be considered lost."""

    def __init__(self) -> None:
        self._at, self._seconds = time.monotonic(), 0.0

    def seconds(self) -> float:
        """Return for how many seconds this process has run since the clock was created."""
        now = time.monotonic()
        self._seconds += min(now - self._at, LONGEST)
        self._at = now
        return self._seconds


def answered(call: Callable[[], T], seconds: float = ANSWER) -> T:
    """Call the store in a separate thread, and return the result. The thread has ended when this function returns, so
    the caller may fork.

    Raises LostStoreError if the call fails or does not return in time."""
    results = list[T]()

    def run() -> None:
        try:
            results.append(call())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    clock = Clock()
    while thread.is_alive() and clock.seconds() < seconds:
        thread.join(LOOK)
    if not thread.is_alive():
        wait_until_gone(thread, seconds)
    if not results:
        raise LostStoreError("the store of the ranks does not answer")
    return results[0]


@dataclass(frozen=True)
class Start:
    """Plan for starting the ranks: which process runs which rank, and with which parallel layout."""

    roster: Roster
    """Number of the worker (launcher process) that runs each rank."""

    living: tuple[int, ...]
    """Workers that will run a rank or wait as a spare."""

    rung: str = ""
    """Method by which the ranks recover from a failure, such as `faults.SPARES`. Events and the log name this
    method."""

    why: tuple[str, ...] = ()
    """Reasons why the ranks could not recover by better methods, one line per method."""

    layout: str = ""
    """Layout under which the ranks continue, serialized by `layouts.layout_text`. Empty if they continue under the
    layout that the run's flags set."""

    ends: str = ""
    """Reason why the ranks cannot be started again; empty if they can be started again."""

    @classmethod
    def from_json(cls, text: str) -> Start:
        """Restore a plan from the text that `to_json` returned."""
        record = json.loads(text)
        lists = {name: tuple(record[name]) for name in ("roster", "living", "why")}
        return cls(**{**record, **lists})

    def to_json(self) -> str:
        """Serialize this plan to text for the store."""
        return json.dumps(asdict(self))


Decide = Callable[[Collection[int], "dict[int, str]"], Start]
"""Function that plans how to start the ranks again. The arguments are the workers that are ready, and a mapping from
workers to hosts."""


@dataclass
class Parents:
    """Connection of a parent process to the parent processes of the other ranks, through a store."""

    store: dist.Store
    worker: int
    world: int
    serves: StoreProcess | None = None
    """Process that worker 0 has forked to serve the store. The value is None on all other workers, and also on worker 0
    if the launcher serves the store."""

    startup: float = 0.0
    """Maximum time in seconds until each parent connects to the store for the first time."""

    peers: dict[int, tuple[str, Peer]] = field(default_factory=dict)
    """Maps each worker to the name of its host and the `Peer` that identifies its process."""

    _beats: int = 0
    _clock: Clock = field(default_factory=Clock)
    _old: list[tuple[dist.Store, str]] = field(default_factory=list)
    """Store keys of earlier starts of the ranks that this parent still has to delete."""

    _silence: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Maps each worker to its last heartbeat and the time at which this heartbeat was first seen."""

    @classmethod
    def of(cls, config: RunConfig, launch: Launch) -> Parents:
        """Connect to the parents of the other ranks. If the launcher has no store, worker 0 forks a process that serves
        the store. Children also use this store."""
        launch.export(os.environ)
        limit = timedelta(minutes=config.parallel.startup_timeout_minutes)
        run, serves = identity(config), None
        if launch.rank == 0 and launch.world_size > 1 and not launcher_has_store():
            serves = StoreProcess(launch, limit, STORE, run)
        store = meet(launch, limit, STORE, run, open_here=False)
        if launch.world_size > 1:
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        there = cls(store, launch.rank, launch.world_size, serves, limit.total_seconds())
        store.set(f"parent/{launch.rank}", json.dumps([host_name(), asdict(Peer.here())]))
        return there

    def beat(self) -> None:
        """Write a heartbeat of this worker to the store."""
        self._beats += 1
        self._answered(lambda: self.store.set(f"beat/{self.worker}", str(self._beats)))

    def ask(self, number: int) -> None:
        """Request that the ranks be started again, as start number `number`."""
        self._answered(lambda: self.store.set(f"again/{number}", "1"))

    def asked(self, number: int) -> bool:
        """Return True if a parent has requested start number `number` of the ranks, or if this start or a later start
        has already begun."""
        return self._answered(lambda: self.store.check([f"again/{number}"])) or self._newest() >= number

    def lost(self, workers: Collection[int]) -> bool:
        """Return True if all of `workers` are considered lost although the run continues. The run continues until a
        parent ends permanently."""
        gone = all(self._is_gone(worker, self._silence, LOST) for worker in workers)
        return gone and self.over() is None

    def is_stopped(self, worker: int) -> bool:
        """Return True if a worker on this machine is stopped by a signal (SIGSTOP)."""
        peer = self._peer(worker)[1]
        return bool(peer.namespace) and peer.namespace == Peer.here().namespace and peer.state() == "T"

    def kill(self, worker: int) -> None:
        """Kill a worker on this machine. If the worker has already ended, do nothing."""
        with suppress(ProcessLookupError):
            os.kill(self._peer(worker)[1].pid, signal.SIGKILL)

    def leave(self, code: int, living: Collection[int]) -> None:
        """Announce to the other parents that this parent ends permanently, with the exit code `code`. Worker 0 then
        waits until the workers in `living` no longer need the store, because the store may end together with worker
        0."""
        self._answered(lambda: self.store.set("over", str(code)))
        self.left()
        clock, keys = Clock(), [f"left/{worker}" for worker in living]
        while self.worker == 0 and clock.seconds() < PARTING and not self._answered(lambda: self.store.check(keys)):
            time.sleep(LOOK)

    def left(self) -> None:
        """Announce to the other parents that this parent no longer needs the store."""
        self._answered(lambda: self.store.set(f"left/{self.worker}", "1"))

    def over(self) -> int | None:
        """Return the exit code of a parent that has ended permanently; None if there is no such parent."""
        return self._answered(lambda: int(self.store.get("over")) if self.store.check(["over"]) else None)

    def gather(self, number: int, before: Start, decide: Decide) -> Start:
        """Wait until all living parents are ready to start the ranks again, and return the plan for this start. Workers
        that are ready too late are not in the plan's `living`, and do not take part. `number` is the number of the
        start, and `before` is the plan of the previous start. One of the workers calls `decide` to make the plan."""
        self._answered(lambda: self.store.set(f"here/{number}/{self.worker}", "1"))
        clock, silence = Clock(), dict[int, tuple[int, float]]()
        while True:
            if (found := self._decided(number)) is not None:
                return found
            if self._newest() > number:
                return Start((), (), ends="the other ranks have continued without it")
            if self.over() is not None:
                return Start((), (), ends="a rank has ended permanently")
            missing = self._missing(number, before.living)
            if any(map(self._is_awaited, missing)):
                clock = Clock()
            complete = clock.seconds() > ROLL or all(self._is_gone(worker, silence) for worker in missing)
            if complete and self._decides(number):
                came = [worker for worker in before.living if worker not in missing]
                start = decide(came, {worker: self._peer(worker)[0] for worker in before.living})
                self._propose(number, start)
            self.beat()
            time.sleep(LOOK)

    def forget(self, number: int) -> None:
        """Record in the store that the newest start of the ranks has the number `number`. A worker that was suspended
        reads this record, and notices that the ranks were started without it. Collect the store keys of earlier starts,
        which `tidy` deletes.
        """
        self._answered(lambda: self.store.set("newest", str(number)))
        whole = self.store.underlying_store if isinstance(self.store, dist.PrefixStore) else self.store
        if not hasattr(whole, "list_keys"):  # torch 2.11 has no list_keys, so old keys are not deleted
            return
        for key in self._answered(whole.list_keys):
            of = start_of(key)
            if of is not None and of < number:
                self._old.append((whole, key))
        for key in self._answered(self.store.list_keys):
            kind, _, rest = key.partition("/")
            if kind in KINDS and int(rest.partition("/")[0]) < number:
                self._old.append((self.store, key))

    def tidy(self) -> None:
        """Delete up to `DELETED` of the store keys that `forget` has collected."""
        some, self._old = self._old[:DELETED], self._old[DELETED:]
        if some:
            self._answered(lambda: [store.delete_key(key) for store, key in some])

    def offer(self, number: int, offer: str) -> None:
        """Offer the copies of the training state on this host to the ranks that run in start number `number`. The host
        may be a host without ranks. `offer` is the text that `idle_hosts.offered` returns."""
        self._answered(lambda: self.store.set(f"offer/{number}/{self.worker}", offer))

    def offers(self, number: int, workers: Collection[int]) -> list[str]:
        """Return the texts that `workers` have passed to `offer` for start number `number`. Workers whose offers arrive
        too late are omitted."""
        clock, keys = Clock(), [f"offer/{number}/{worker}" for worker in workers]
        while keys and clock.seconds() < OFFERS and not self._answered(lambda: self.store.check(keys)):
            time.sleep(LOOK)
        return [self._get(each) for each in keys if self._there(each)]

    def _answered(self, call: Callable[[], T]) -> T:
        """Return the answer of the store to `call` (see `answered`). If this worker forked the process that serves the
        store, and a signal has stopped the forked process, resume the forked process and retry the call."""
        try:
            return answered(call)
        except LostStoreError:
            if self.serves is None or not self.serves.resume():
                raise
            return answered(call)

    def _decides(self, number: int) -> bool:
        """Return True if this parent is to plan start number `number` of the ranks. The first parent that claims this
        role makes the plan. If this parent is too slow or lost, another parent makes the plan instead."""
        key, own = f"decides/{number}", f"{self.worker} {time.time()}"
        claim = self._answered(lambda: self.store.compare_set(key, "", own).decode())
        worker, at = claim.split()
        peer = self._peer(int(worker))[1]
        is_here = peer.namespace == Peer.here().namespace and bool(peer.namespace)
        return claim == own or abs(time.time() - float(at)) > DECIDES or (is_here and not peer.state())

    def _propose(self, number: int, start: Start) -> None:
        self._answered(lambda: self.store.compare_set(f"start/{number}", "", start.to_json()))

    def _newest(self) -> int:
        return self._answered(lambda: int(self.store.get("newest")) if self.store.check(["newest"]) else -1)

    def _get(self, key: str) -> str:
        return self._answered(lambda: self.store.get(key).decode())

    def _there(self, key: str) -> bool:
        return self._answered(lambda: self.store.check([key]))

    def _decided(self, number: int) -> Start | None:
        key = f"start/{number}"
        return self._answered(
            lambda: Start.from_json(self.store.get(key).decode()) if self.store.check([key]) else None
        )

    def _missing(self, number: int, living: Collection[int]) -> list[int]:
        """Return the workers in `living` that have not yet reported that they are ready for start number `number`."""
        keys = {worker: f"here/{number}/{worker}" for worker in living}
        if self._answered(lambda: self.store.check(list(keys.values()))):
            return []
        return [worker for worker, key in keys.items() if not self._there(key)]

    def _peer(self, worker: int) -> tuple[str, Peer]:
        if worker not in self.peers:
            key = f"parent/{worker}"
            if not self._there(key):
                return "", Peer("", 0, "", "")
            host, peer = json.loads(self._get(key))
            self.peers[worker] = host, Peer(**peer)
        return self.peers[worker]

    def _is_awaited(self, worker: int) -> bool:
        """Return True if a worker has never connected to the store, and still has time to connect for the first
        time."""
        return self._clock.seconds() < self.startup and not self._there(f"parent/{worker}")

    def _is_gone(self, worker: int, silence: dict[int, tuple[int, float]], seconds: float | None = None) -> bool:
        """Return True if a worker is lost. A worker on this machine is lost if its process has ended. A worker on
        another machine is considered lost if it has sent no heartbeat for `seconds` (default `SILENT`). This method
        updates `silence`, which maps each worker to its last heartbeat and the time at which the heartbeat was first
        seen."""
        peer, now = self._peer(worker)[1], self._clock.seconds()
        if not peer.pid and self._is_awaited(worker):
            return False
        if peer.namespace and peer.namespace == Peer.here().namespace:
            return not peer.state()
        key = f"beat/{worker}"
        beat = self._answered(lambda: int(self.store.get(key)) if self.store.check([key]) else -1)
        if silence.get(worker, (None,))[0] != beat:
            silence[worker] = beat, now
        return now - silence[worker][1] > (SILENT if seconds is None else seconds)
