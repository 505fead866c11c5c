"""Part of a rank's watchdog that detects lost hosts. This part starts the heartbeat process of the rank's host, and
ends the rank with a report if other hosts are lost. Before two heartbeat processes know each other's addresses, a host
is considered lost if the store does not answer and the host of the store does not accept connections.

The store has these keys:

    `link/R`: the `Link` of rank R.
    `heartbeats`: token that all heartbeats contain. Each start of the ranks uses a new token.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.extensions.operate.resilience.flags import ResilienceConfig
from megatron.extensions.operate.resilience.heartbeat import FULL_MESH, Ignored, check_findings, unseal
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.failure_handler import FailureHandler
from megatron.training.reliability.failure_report import ADVICE, Failure
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.rank_status import RankStatus
from megatron.training.reliability.rank_store import Board
from megatron.training.reliability.untrusted import parse_record
from megatron.training.reliability.watchdog import Watch, Watchdog

ADVICE_HOST = (
    "check the power, cable and switch of the named host; the same command resumes from the latest checkpoint, on the "
    "remaining hosts (with fewer ranks, if the model-parallel sizes permit it) or with a replacement host; "
    "scripts/train_gpt_elastic.sh and scripts/train_gpt_slurm.sh do this automatically; if hosts may be suspended for "
    "longer, raise --host-heartbeat-timeout-seconds"
)
PROGRAM = Path(__file__).with_name("heartbeat.py")
FEW = 64
"""Up to this world size, the addresses of ranks are read from the store as the ranks arrive. In larger runs, all
addresses are read at once after the last rank has arrived."""

PEACE = 60.0
"""If the run on another host has ended without a failure, a rank that is within a step ends after this number of
seconds without progress."""

LOOK = 0.5
"""Seconds between two checks of whether the store answers."""

ANSWER = 2.0
"""Timeout in seconds for a TCP connection to another host. The kernel of a live host accepts the connection within this
time."""

OPENS = 120.0
"""Timeout in seconds for the start of the heartbeat process."""

TOKEN_BYTES = 16
"""Number of random bytes in a heartbeat token."""


@dataclass(frozen=True)
class Link:
    """Network addresses of a rank and its host. Each rank listens on the port `ear` for messages from the heartbeat
    process of its own host. The first rank of a host also has the `address` and `port` at which the host receives
    heartbeats from other hosts."""

    host: str
    machine: str
    """Host name, followed by the process namespace."""

    ear: int
    """Loopback UDP port on which the rank receives messages from its host's heartbeat process."""

    first: bool
    """True if the rank is the first rank of its host. The first rank starts the host's heartbeat."""

    address: str = ""
    port: int = 0


class AskedStore:
    """Wrapper around a store that records when each waiting thread began to wait for an answer."""

    def __init__(self, store: object) -> None:
        self._store, self._since = store, dict[int, float]()

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self._store, name)

        def asked(*args: object) -> object:
            thread = threading.get_ident()
            self._since[thread] = time.monotonic()
            try:
                return call(*args)
            finally:
                del self._since[thread]

        return asked

    def waits(self) -> float:
        """Return the longest time in seconds that a thread has been waiting for an answer; 0 if no thread is
        waiting."""
        since = list(self._since.values())
        return time.monotonic() - min(since) if since else 0.0


def watch_hosts(config: RunConfig, watchdog: Watchdog) -> HostWatch:
    """Start watching the other hosts from this rank, and return the `HostWatch`. This function is called before the run
    checks its folders."""
    assert watchdog.board is not None
    timeout = config.options(ResilienceConfig).host_heartbeat_timeout_seconds
    watch = HostWatch(watchdog.launch, watchdog.status, watchdog.failures, watchdog.board, timeout)
    watch.open()
    return watch


class HostWatch(Watch):
    """Part of a rank's watchdog that detects lost hosts. A host is considered lost after `timeout` seconds without a
    heartbeat."""

    def __init__(
        self, launch: Launch, status: RankStatus, failures: FailureHandler, board: Board, timeout: float
    ) -> None:
        self._launch = launch
        self._status = status
        self._failures = failures
        self._board = board
        self._store = AskedStore(board.store)
        self._timeout = timeout
        self._token = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._links, self._told = dict[int, Link](), 0
        self._excused = dict[int, float]()
        """Maps a host to the duration of its silence, in seconds, at the time of its last answer over TCP. The dict
        contains only hosts from which no heartbeat has ever arrived."""

        self._lost = False
        """True if this rank ends because other hosts are lost."""

        self._place, self._since = "", 0.0
        """Current phase of this rank, such as a step and a pipeline action, and the time at which the phase was first
        seen. The phase and the time are updated only after the run on another host has ended."""

        self._closed = threading.Event()
        self._ear = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._ignored = Ignored(launch.name(socket.gethostname()))

    def open(self) -> None:
        """Start watching the other hosts."""
        board = self._board
        board.store = self._store
        self._ear.bind(("127.0.0.1", 0))
        threading.Thread(target=self._ask_after_store, name="store watch", daemon=True).start()
        self._token = board.claim("heartbeats", secrets.token_hex(TOKEN_BYTES), _parse_token)
        self._failures.at_exit.append(self.close)
        self._publish(self._start() if self._launch.local_rank == 0 else 0)
        threading.Thread(target=self._listen, name="host watch", daemon=True).start()

    def look(self) -> None:
        """Read the addresses of other hosts from the store, and pass them to the heartbeat process. If the heartbeat
        process was killed, start it again. The watchdog's thread calls this method."""
        board = self._board
        if self._process is not None and self._process.poll() is not None and not self._closed.is_set():
            self._told = 0  # restart a killed heartbeat process; otherwise, other hosts would report this host as lost
            self._publish(self._start())
        world = self._launch.world_size
        if len(self._links) < world and (world <= FEW or board.complete("link")):
            # Create a new dict, because another thread may be iterating over the old one.
            self._links = self._links | board.read_all("link", _parse_link)
        known = len(self._links) if len(self._links) == world or len(self._hosts()) <= FULL_MESH else 0
        if self._process is not None and known > self._told:
            self._told = known
            found = {rank: _resolved(self._address(rank), link.port) for rank, link in self._hosts().items()}
            hosts = {rank: address for rank, address in found.items() if address}
            here = self._links[self._launch.rank].machine
            ears = [link.ear for link in self._links.values() if link.machine == here]
            self._order(token=self._token, ears=ears, hosts=hosts)

    def close(self) -> None:
        """End the watch. The heartbeat process tells the other hosts how the run on this host ended: without a failure,
        with a failure, or because hosts were lost."""
        self._closed.set()
        self._ignored.close()
        if self._process is not None:
            with suppress(OSError, subprocess.TimeoutExpired):
                self._order(end="lost" if self._lost else "failed" if self._failures.ending else "bye")
                self._process.wait(1.0)

    def _start(self) -> int:
        """Start the heartbeat process of this host, and return its port."""
        family = _way_to(*_store_address())[0]
        words = [os.getpid(), self._launch.rank, self._launch.world_size, self._timeout, int(family)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(PROGRAM), *map(str, words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], OPENS)[0]:
            raise OSError(f"the heartbeat process of this host did not start within {OPENS:g} s")
        return int(self._process.stdout.readline() or 0)

    def _publish(self, port: int) -> None:
        me = self._board.me
        address, ear = _way_to(*_store_address())[1], self._ear.getsockname()[1]
        link = Link(me.host, me.host + me.namespace, ear, self._launch.local_rank == 0, address, port)
        self._links[self._launch.rank] = link
        self._board.say("link", json.dumps(asdict(link)))

    def _order(self, **order: object) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # the heartbeat process may have died; the next call of `look` restarts it
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()

    def _hosts(self) -> dict[int, Link]:
        """Return the `Link` of the first rank of each known host, keyed by rank."""
        return {rank: link for rank, link in self._links.items() if link.first}

    def _address(self, rank: int) -> str:
        """Return the address of a host, given its first rank. The address of rank 0's host is MASTER_ADDR, because that
        host may use a different name for itself."""
        return os.environ["MASTER_ADDR"] if rank == 0 else self._links[rank].address

    def ranks_of(self, host: int) -> list[int]:
        """Return all ranks of a host. `host` is the host's first rank, by which hosts are identified."""
        if host not in self._links:  # a heartbeat has arrived from the host, but its address is not yet in the store
            return [host]
        machine, found = self._links[host].machine, list[int]()
        for rank in sorted(self._links):
            link = self._links[rank]
            if link.machine == machine and rank >= host:
                if link.first and rank != host:
                    break
                found.append(rank)
        return found

    def _listen(self) -> None:
        while not self._closed.is_set():
            data, sender = self._ear.recvfrom(65536)
            try:
                findings = unseal(self._token, data)
                check_findings(findings, self._launch.world_size)
            except ValueError as error:
                self._ignored.add(sender, error)
                continue
            try:
                if not self._closed.is_set():
                    self._act(findings)
            except Exception as error:
                self._failures.fail(error)  # end the rank, because this thread ends and no longer detects lost hosts

    def _ask_after_store(self) -> None:
        """End this rank if neither the store nor rank 0's host, which runs the store, has answered within the
        timeout."""
        address = _store_address()
        while not self._closed.wait(LOOK):
            if self._store.waits() > self._timeout / 2 and not _answers(address, self._timeout):
                silent = self._store.waits()
                if silent > self._timeout:
                    self._end_without({(0, "silent"): silent}, [])

    def _end_without(self, lost: dict[tuple[int, str], float], fine: Collection[int]) -> None:
        self._lost = True
        self._failures.unreachable(
            self._failure(lost, fine), [rank for host, _ in lost for rank in self.ranks_of(host)]
        )

    def _act(self, found: dict[str, Any]) -> None:
        def ages(kind: str) -> dict[int, float]:
            return {int(host): float(age) for host, age in found.get(kind, {}).items()}

        lost = {(host, kind): age for kind in ("silent", "deaf") for host, age in ages(kind).items()}
        unheard = {h: age for h, age in ages("unheard").items() if age - self._excused.get(h, 0.0) > self._timeout}
        if not lost and unheard:
            lost |= {(host, "silent"): age for host, age in unheard.items() if not self._lives(host, age)}
        if lost:
            self._end_without(lost, [int(host) for host in found["fine"]])
        for host in found["gone"]:
            self._failures.report_gone(int(host))
        ended = ages("failed")
        if not ended and found["over"] and self._waits():
            ended = ages("over")
        if ended:
            self._failures.unreachable(self._left_behind(ended, bool(found["failed"])), list(ended))

    def _waits(self) -> bool:
        """Return True if this rank has made no progress within a step for `PEACE` seconds. The time is measured from
        the first call of this method."""
        place, now = self._status.phase_and_action(), time.monotonic()
        if place != self._place:
            self._place, self._since = place, now
        return place.startswith("step") and now - self._since > PEACE

    def _left_behind(self, ended: dict[int, float], failed: bool) -> Failure:
        """Return a report that the run has ended on some hosts while it continues on this host. `ended` maps each host
        on which the run has ended to the number of seconds since that time. `failed` states whether the run ended with
        a failure on these hosts."""
        fine = "without a failure, while this rank is in a step"
        how = "with a failure whose report has not arrived here" if failed else fine
        what = "\n".join(f"the run on {self._named(host)} ended {age:.0f} s ago {how}" for host, age in ended.items())
        who = ", ".join(map(self._named, ended))
        phase, advice = self._status.phase_and_action(), ADVICE_HOST if failed else ADVICE["collective"]
        return Failure(self._launch.rank, who, phase, "ended before this rank", what, advice)

    def _lives(self, host: int, age: float) -> bool:
        """Return True if a host answers over TCP although no heartbeat has ever arrived from it. In this case, the host
        is alive, but its UDP datagrams are blocked. `age` is the number of seconds for which the host has been
        silent."""
        if host not in self._links or not _answers((self._address(host), self._links[host].port), ANSWER):
            return False
        first, self._excused[host] = host not in self._excused, age
        if first and self._launch.local_rank == 0:
            here = self._links[self._launch.rank]
            print(
                f"no heartbeat of {self._named(host)} has arrived on {here.host} in {age:.0f} s, though it is there: "
                f"does a firewall block UDP to port {here.port}? Without heartbeats, a lost host is noticed only if it "
                "does not answer a connection, and a lost rank only after --distributed-timeout-minutes",
                flush=True,
            )
        return True

    def _host_name(self, host: int) -> str:
        if host in self._links:
            return self._links[host].host
        return os.environ["MASTER_ADDR"] if host == 0 else f"the host of rank {host}"

    def _named(self, host: int) -> str:
        ranks = self.ranks_of(host)
        numbers = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        return f"{self._host_name(host)} ({numbers} of {self._launch.world_size})"

    def _failure(self, lost: dict[tuple[int, str], float], fine: Collection[int]) -> Failure:
        """Return a failure report that names the lost hosts. `lost` maps pairs (host, state) to the seconds that the
        state has lasted, where the state is `silent` or `deaf`. `fine` lists hosts whose messages arrive."""
        rank = self._launch.rank
        here = max((first for first in self._hosts() if rank in self.ranks_of(first)), default=rank)
        me, lines = self._named(here), list[str]()
        for (host, how), age in lost.items():
            if how == "silent":
                lines.append(f"{me} has heard nothing from {self._named(host)} for {age:.1f} s")
            else:
                lines.append(
                    f"{self._named(host)} has heard nothing from {me} for {age:.1f} s, although its own messages "
                    f"arrive: messages to {self._host_name(host)} are lost"
                )
        lines += [f"{me} hears {', '.join(map(self._named, fine))}"] if fine else []
        alone = len(lost) > 1 and not fine
        if alone:
            lines.append(f"no watched host can be reached: {self._host_name(here)} itself may be cut off")
        who = me if alone else ", ".join(self._named(host) for host, _ in lost)
        title = "cut off from other hosts" if alone else "host cannot be reached"
        phase = f"{self._status.phase_and_action()}, as seen from {self._host_name(here)}"
        return Failure(rank, who, phase, title, "\n".join(lines), ADVICE_HOST)


def _parse_link(text: str) -> Link:
    link = parse_record(Link, text)
    if not (0 < link.ear < 1 << 16 and 0 <= link.port < 1 << 16):
        raise ValueError(f"there is no port {link.ear}, or no port {link.port}")
    return link


def _parse_token(text: str) -> str:
    if len(text) != 2 * TOKEN_BYTES or not set(text) <= set("0123456789abcdef"):
        raise ValueError(f"the token does not consist of {2 * TOKEN_BYTES} hexadecimal digits")
    return text


def _store_address() -> tuple[str, int]:
    """Return the address of the rendezvous store."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _way_to(address: str, port: int) -> tuple[socket.AddressFamily, str]:
    """Return the address family that this host uses to reach `address`, and this host's own address on that route."""
    family, kind, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(target)
        return family, way.getsockname()[0]


def _answers(address: tuple[str, int], seconds: float) -> bool:
    """Return True if a host answers a connection attempt within `seconds`. A refused connection also shows that the
    host is alive."""
    try:
        with socket.create_connection(address, seconds):
            return True
    except ConnectionRefusedError:
        return True
    except OSError:
        return False


def _resolved(address: str, port: int) -> list[object] | None:
    """Return an address in the form that `sendto` needs; None if the name cannot be resolved."""
    try:
        return list(socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0][4])
    except OSError:
        return None
