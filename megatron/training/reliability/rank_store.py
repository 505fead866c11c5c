"""Out-of-band messages between ranks over the rendezvous store.

Keys, where R is a rank, W is the name of a meeting point of all ranks, and N is the number of a request:
    peer/R      host, process and namespace of rank R
    beat/R      heartbeat of rank R, which changes while R is alive and contains the phase of R
    cause       root cause of the failure of the run; only the first value is kept
    place/R     phase and line of code of rank R at the time at which R read `cause`
    told        the printed failure report
    left/R      exists if rank R has read the report and no longer needs the store
    over/R      exists if rank R has ended without a failure
    world       world size according to the first rank that connected
    came/W      number of ranks that have reached W; came/W/R exists if rank R has reached it
    ask/N       the request, which is to stop or to save
    at/N/R      number of ticks that rank R had begun when it read the request
    agreed/N    tick after which all ranks carry out the request

No call blocks for longer than the store takes to answer, so missing ranks do not delay others. Any process that can
reach the port can write to the store. Malformed values are ignored, and the first is reported.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.child_processes import process_stat, wait_until_gone
from megatron.training.reliability.failure_report import Failure
from megatron.training.reliability.launch import START, Launch
from megatron.training.reliability.store_port import ForeignPortError, describe_port, leave_failure, left_failure
from megatron.training.reliability.untrusted import Ignored, parse_integer, parse_record

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


PERIOD = 0.4
"""Seconds between a rank's checks of the store."""

MARGIN = 3.0
"""Seconds that torch may need, beyond the time limit of a connection, to report that the connection failed."""

PATIENCE = 10.0
"""Seconds after which a rank that waits at start-up prints what it is waiting for."""


def tell(line: str) -> None:
    """Print a line on standard error, if standard error can be written."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class NoStoreError(ConnectionError):
    """Raised if this rank cannot reach the ranks' store. `waited` is True if the rank waited until the timeout."""

    def __init__(self, message: str, waited: bool = False) -> None:
        super().__init__(message)
        self.waited = waited


def meet(launch: Launch, timeout: timedelta, name: str, run: str = "", open_here: bool = True) -> dist.Store:
    """Connect to the store of this world. Rank 0 opens the store, unless the launcher has opened one. With
    `open_here=False`, rank 0 connects like the other ranks, because another process on rank 0 has opened the store.

    torchrun's store outlives the ranks that torchrun restarts, so each start uses its own keys. If rank 0 opens the
    store, each start has a separate port and store. Raises NoStoreError if there is no store within `timeout`, if rank
    0 cannot open the store, or if the store belongs to another run. `run` is the `identity` of this run. If `run` is
    empty, the run to which the store belongs is not checked."""
    if launch.world_size == 1:
        return dist.HashStore()
    has_one = launcher_has_store()
    opens = launch.rank == 0 and not has_one and open_here
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise NoStoreError(f"rank {launch.rank} cannot find the other ranks: {' and '.join(missing)} not set")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = _connected(address, port, launch, opens, timeout)
    except (dist.DistNetworkError, dist.DistStoreError, TimeoutError, ForeignPortError) as error:
        does = "cannot open" if opens else "did not find"
        why = str(error).partition("\n")[0]  # torch adds C++ frames after the first line
        what = f"rank {launch.rank} {does} the store of the ranks at {address}:{port}: {why}"
        taken = "EADDRINUSE" in why
        if opens and taken:
            leave_failure(address, port, why)
        raise NoStoreError(what, waited=not (taken or isinstance(error, ForeignPortError))) from error
    if run and not has_one:
        _check_run(store, launch, run, timeout, (address, port))
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "") if has_one else ""
    start += f".{os.environ[START]}" if START in os.environ else ""
    return dist.PrefixStore(f"{name}/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{start}", store)


def identity(config: RunConfig) -> str:
    """Return a text that identifies a run and is equal on all ranks of the run."""
    model = hashlib.sha256(repr(config.model).encode()).hexdigest()[:8]
    return f"--save {config.checkpoint.save_root}, --seed {config.training.seed}, model {model}"


def _check_run(store: dist.Store, launch: Launch, run: str, limit: timedelta, at: tuple[str, int]) -> None:
    """Raise NoStoreError if rank 0 of another run has opened this store, because both runs use the same port. Rank 0
    stores the text that identifies its run as soon as it has opened the store."""
    if launch.rank == 0:
        store.set("run", run)
    until, where = time.monotonic() + limit.total_seconds(), f"{at[0]}:{at[1]}"
    while not (there := store.check(["run"])) and time.monotonic() < until:
        if why := left_failure(*at):
            raise NoStoreError(f"rank 0 cannot open the store of the ranks at {where}: {why}")
        time.sleep(0.01)
    found = _text(store.get("run")) if there else "another program"
    if found != run:
        raise NoStoreError(
            f"rank {launch.rank} of the run with {run} has found the store of another run at {where}: {found}; give "
            "the two runs different ports (MASTER_PORT), or all ranks of one run the same flags"
        )


def start_of(key: str) -> int | None:
    """Return the start number that `key` contains, or None if the key contains no such number. `meet` adds the number
    of the rank's start (`START`) to keys of the store."""
    run, restart = (re.escape(os.environ.get(f"TORCHELASTIC_{name}", "")) for name in ("RUN_ID", "RESTART_COUNT"))
    match = re.match(rf"\w+/{run}/{restart}\.(\d+)/", key)
    return int(match[1]) if match else None


def launcher_has_store() -> bool:
    """Return True if the store is in a launcher process, as under torchrun, and not in the process of rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_refuses() -> bool:
    """Return True if the store's host refuses connections to the store's port, because no process listens there."""
    address = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        socket.create_connection(address, timeout=1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # The host or the network may be down, so it is unknown whether the port is open.
        return False
    return False


def _connected(address: str, port: int, launch: Launch, opens: bool, timeout: timedelta) -> dist.Store:
    """Connect to a store.

    Raises TimeoutError if another program listens on the port and does not answer; torch itself would wait forever.
    Raises ForeignPortError as soon as it is certain that no store will open on the port.
    """
    stores, errors = list[dist.Store](), list[BaseException]()

    def connect() -> None:
        try:
            stores.append(
                dist.TCPStore(
                    address,
                    port,
                    launch.world_size,
                    is_master=opens,
                    timeout=timeout,
                    wait_for_workers=False,
                    multi_tenant=True,  # init_process_group opens the same port again on rank 0
                )
            )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=connect, name="rendezvous", daemon=True)
    thread.start()
    began, told = time.monotonic(), opens or not (launch.local_rank == 0 or launch.rank == 1)
    while thread.is_alive() and (waited := time.monotonic() - began) < timeout.total_seconds() + MARGIN:
        if not opens and (why := left_failure(address, port)) is not None:
            raise ForeignPortError(f"rank 0 cannot open it: {why}")
        if waited > PATIENCE and not told:
            state, told = describe_port(address, port), True
            tell(f"rank {launch.rank} waits for the store of the ranks at {address}:{port}: {state}")
        thread.join(PERIOD)
    if not thread.is_alive():
        wait_until_gone(thread, MARGIN)  # otherwise, a child process that is forked later could hang
    if errors:
        raise errors[0]
    if not stores:
        raise TimeoutError("the program at the port does not answer like a store; does another program use the port?")
    return stores[0]


@dataclass(frozen=True)
class Peer:
    """Description of a process that other processes on the same machine can use to find the process."""

    host: str
    pid: int
    namespace: str
    started: str
    """Start time of the process. A later process with the same pid has a different start time."""

    @classmethod
    def here(cls) -> Peer:
        boot = Path("/proc/sys/kernel/random/boot_id")
        if not boot.exists():
            return cls(socket.gethostname(), os.getpid(), "", "")
        namespace = boot.read_text().strip() + os.readlink("/proc/self/ns/pid")
        return cls(socket.gethostname(), os.getpid(), namespace, process_stat(os.getpid())[1])

    def state(self) -> str:
        """Return the state of the process as Linux reports it: `T` if it is suspended, empty if it is gone."""
        state, started = process_stat(self.pid)
        return state if started == self.started and state not in ("Z", "X") else ""


def out_of_memory_kills() -> int:
    """Return the number of processes that the out-of-memory killer of this machine has ended since boot."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


KINDS = ("save", "stop", "resume")


@dataclass(frozen=True)
class Request:
    """Request to stop or save. All ranks carry out the request after the same step or evaluation batch."""

    kind: str
    """Kind of the request, one of `KINDS`: `save`, `stop`, or `resume` (stop so that the run can be restarted)."""

    why: str


T = TypeVar("T")


def _json(value: DataclassInstance) -> str:
    return json.dumps(asdict(value))


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _parse_peer(text: str) -> Peer:
    peer = parse_record(Peer, text)
    if peer.pid < 1:  # a signal to pid 0 or below would reach a whole process group
        raise ValueError(f"pid is {peer.pid}, not above 0")
    return peer


def _parse_request(text: str) -> Request:
    request = parse_record(Request, text)
    if request.kind not in KINDS:
        raise ValueError(f"kind is {request.kind!r}, not one of {', '.join(KINDS)}")
    return request


class Board:
    """Interface through which one rank accesses the rendezvous store."""

    def __init__(self, store: dist.Store, launch: Launch) -> None:
        self.store: Any = store
        """Client with which this rank accesses the store. A `Watch` may replace the client."""

        self.launch, self.peers = launch, dict[int, Peer]()
        self.ranks = range(launch.world_size)
        self.me = Peer.here()
        self.ignored = Ignored(lambda: self.name(launch.rank), reports=launch.rank == 0)
        """Counter of malformed values in the store; rank 0 reports the first such value."""

        self._malformed = dict[str, int]()
        """Hash of the malformed value counted last for each key, so that no value is counted twice."""

        self.first_phase = ""
        """Phase in which rank 0 was when `watch_first` was last called."""

        self._beats = 0
        store.set(f"peer/{launch.rank}", _json(self.me))

    def check_world_size(self) -> None:
        """Raise ValueError if this rank and the first rank to arrive have different world sizes."""
        rank, own = self.launch.rank, self.launch.world_size
        if (first := self.claim("world", str(own), parse_integer)) != own:
            raise ValueError(
                f"rank {rank} was started as one of {own} ranks, but the first rank to connect as one of {first}: all "
                "ranks need the same world size (WORLD_SIZE, which torchrun and srun set); start all ranks of one run "
                "with one command, and two runs with different ports (MASTER_PORT)"
            )

    def get(self, key: str) -> str | None:
        """Return the value stored under `key`, or None if there is no value yet."""
        return _text(self.store.get(key)) if self.store.check([key]) else None

    def read(self, key: str, parse: Callable[[str], T]) -> T | None:
        """Return the value of a key, parsed by `parse`, or None if it is missing or `parse` raises ValueError."""
        text = self.get(key)
        return self._parsed(key, text, parse) if text else None

    def read_all(self, name: str, parse: Callable[[str], T]) -> dict[int, T]:
        """Return a dict from rank to parsed value. Ranks with missing or malformed values are omitted."""
        found = {rank: self._parsed(f"{name}/{rank}", text, parse) for rank, text in self.get_all(name).items()}
        return {rank: value for rank, value in found.items() if value is not None}

    def claim(self, key: str, value: str, parse: Callable[[str], T]) -> T:
        """Store `value` under `key`, unless `key` already has a value that `parse` accepts. Return the value that is
        then stored."""
        parse(value)
        found, there = None, b""
        while found is None:
            there = self.store.compare_set(key, there, value)
            found = self._parsed(key, _text(there), parse)
        return found

    def _parsed(self, key: str, text: str, parse: Callable[[str], T]) -> T | None:
        try:
            return parse(text)
        except ValueError as error:
            if self._malformed.get(key) != hash(text):
                self._malformed[key] = hash(text)
                self.ignored.add(f"the value of {key} in the rendezvous store", error)
            return None

    def get_all(self, name: str) -> dict[int, str]:
        """Return the values that are present, keyed by rank."""
        keys = [f"{name}/{rank}" for rank in self.ranks]
        if self.store.check(keys):
            return dict(zip(self.ranks, map(_text, self.store.multi_get(keys)), strict=True))
        found = {rank: self.get(key) for rank, key in zip(self.ranks, keys, strict=True)}
        return {rank: value for rank, value in found.items() if value is not None}

    def complete(self, name: str) -> bool:
        """Return True if the store contains the value `name` of every rank."""
        return self.store.check([f"{name}/{rank}" for rank in self.ranks])

    def neighbours(self) -> dict[int, Peer]:
        """Return the other ranks on this machine. The result is empty until all ranks have connected to the store."""
        if not self.peers and self.complete("peer"):
            self.peers = self.read_all("peer", _parse_peer)
        rank, space = self.launch.rank, self.me.namespace
        return {r: peer for r, peer in self.peers.items() if r != rank and peer.namespace == space and space}

    def peer(self, rank: int) -> Peer | None:
        """Return the process of a rank, or None if the rank has not arrived."""
        return self.peers.get(rank) or self.read(f"peer/{rank}", _parse_peer)

    def name(self, rank: int) -> str:
        """Return the name of a rank for messages, with the host if known."""
        return self.launch.name(self.peers[rank].host if rank in self.peers else socket.gethostname(), rank)

    def state(self, rank: int) -> str:
        """Return `Peer.state` of another rank on this machine; empty for ranks on other machines."""
        peer = self.neighbours().get(rank)
        return peer.state() if peer is not None else ""

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Poll until `condition` is true. Return True if the condition became true within `seconds`."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def post_cause(self, failure: Failure) -> Failure:
        """Make `failure` the root cause, unless a root cause is already stored. Return the stored root cause."""
        return self.claim("cause", _json(failure), self._parse_failure)

    def cause(self) -> Failure | None:
        return self.read("cause", self._parse_failure)

    def post_report(self, failure: Failure) -> None:
        """Publish the printed report to the other ranks."""
        self.store.set("told", _json(failure))

    def report(self) -> Failure | None:
        """Return the failure report that was printed, or None if none was printed yet."""
        return self.read("told", self._parse_failure)

    def _parse_failure(self, text: str) -> Failure:
        """Parse the report of a failure. The reporter's world may be larger than this rank's."""
        failure = parse_record(Failure, text)
        if failure.reporter < 0 or not 0 < failure.code < 256:
            raise ValueError(f"rank {failure.reporter} or exit code {failure.code} is out of range")
        return failure

    def say(self, key: str, value: str = "") -> None:
        """Set this rank's value of `key`."""
        self.store.set(f"{key}/{self.launch.rank}", value)

    def ask(self, number: int, request: Request) -> None:
        """Store `request` as the request with the number `number`, unless this number is already taken."""
        self.claim(f"ask/{number}", _json(request), _parse_request)

    def asked(self, number: int) -> Request | None:
        return self.read(f"ask/{number}", _parse_request)

    def agreed(self, number: int) -> int | None:
        """Return the tick (step or evaluation batch) after which a request is carried out, or None if this tick is not
        known yet. Rank 0 computes this tick, which is the latest tick that any rank has begun."""
        found = self.read(f"agreed/{number}", parse_integer)
        if found is None and self.launch.rank == 0:
            positions = self.read_all(f"at/{number}", parse_integer)
            if len(positions) == len(self.ranks):
                found = max(positions.values())
                self.store.set(f"agreed/{number}", str(found))
        return found

    def beat(self, phase: str) -> None:
        """Report to the other ranks that this rank is alive."""
        self._beats += 1
        self.say("beat", f"{self._beats} {phase}")

    def last_phase(self, rank: int) -> str:
        """Return the phase in a rank's last heartbeat; empty if there was no heartbeat."""
        return (self.get(f"beat/{rank}") or "").partition(" ")[2]

    def watch_first(self) -> None:
        """Keep a copy of rank 0's phase if rank 0 runs on this machine and its process hosts the store."""
        if 0 in self.neighbours() and not launcher_has_store():
            self.first_phase = self.last_phase(0)

    def known_neighbours(self) -> dict[int, Peer]:
        """Return the result of `neighbours()` if this rank has already read it from the store; otherwise, return an
        empty dict."""
        return self.neighbours() if self.peers else {}

    def come(self, meeting: str) -> None:
        """Report to the other ranks that this rank has reached the meeting point `meeting`."""
        self.say(f"came/{meeting}")
        self.store.add(f"came/{meeting}", 1)

    def all_came(self, meeting: str) -> bool:
        return self.store.add(f"came/{meeting}", 0) == self.launch.world_size

    def missing(self, meeting: str) -> list[int]:
        """Return the ranks that have not reached the meeting point `meeting`."""
        came = self.get_all(f"came/{meeting}")
        return [rank for rank in self.ranks if rank not in came]
