"""Heartbeats between hosts over UDP. A small process on each host, separate from the ranks, sends and receives
heartbeats.

The process imports neither torch nor this package, and uses neither collectives nor the store. Therefore, an
interpreter lock, a compilation or a debugger in a rank cannot delay heartbeats. The host's first rank starts the
process. If this rank dies silently, the process reports this to the other hosts and then exits. With every heartbeat,
the process sends its findings to the ranks on its host, over loopback.

A host is silent if no message from it has arrived within the timeout. A host is deaf if its messages say that it has
received no message from this host within the timeout. If a host is deaf, messages are lost in only one direction. Time
during which this process was suspended is not counted.

Any process can send to a reachable port. Therefore, every datagram begins with the token of the run, and is parsed only
after the token is verified. Datagrams without the token or with values of the wrong type are ignored and counted.

The process prints its port, and reads commands from stdin as lines of JSON. Usage:

    python -I -S heartbeat.py PARENT RANK WORLD TIMEOUT FAMILY
"""

from __future__ import annotations

import hmac
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

BEAT = 0.25
"""Seconds between two messages to each watched host."""

PAUSE = 1.0
"""If this process has sent no heartbeat for more than this number of seconds, it is considered to have been
suspended."""

SLACK = 4 * BEAT
"""Hosts that are lost at the same moment exceed the timeout at slightly different times. If one host exceeds the
timeout, this process also reports hosts whose silence is shorter by at most this number of seconds."""

KINDS = ("silent", "deaf", "unheard", "failed", "over")
"""States of another host. For each of these states, `Links.findings` returns a dict that maps hosts to the number of
seconds that the state has lasted."""

FULL_MESH = 16
"""Maximum number of hosts for which each host watches all other hosts."""

LINGER = 10.0
"""Time limit in seconds for this host to end after another host has reported that the run failed there. Normally, this
host ends earlier, because it receives the reason for the failure, or because a collective raises an error. If neither
happens within this time, the messages are assumed to be lost in the network."""

FAREWELLS = 8
"""Number of times that the final message is sent, because datagrams may be lost."""

BURST = 256
"""Maximum number of datagrams, and of TCP connections, that are processed between two checks of the clock. The limit
ensures that a flood of messages does not delay heartbeats."""

ENDS = ("", "bye", "failed", "lost", "gone")
"""Valid values of the field `end` in a heartbeat message (see `Peer.end`)."""


Address = tuple[str | int, ...]
"""Source or destination of a datagram, as in the socket module: host, port, and two more values for IPv6."""


def seal(token: str, message: Mapping[str, object]) -> bytes:
    """Encode a message as a datagram."""
    return token.encode() + json.dumps(message).encode()


def unseal(token: str, data: bytes) -> dict[str, Any]:
    """Decode the message in a datagram. Raises ValueError if the datagram does not begin with the token, or if the
    remaining bytes are not a JSON object."""
    begin, rest = data[: len(token)], data[len(token) :]
    if not token or not hmac.compare_digest(begin, token.encode()):
        raise ValueError("the datagram does not begin with the token of this run")
    try:
        message = json.loads(rest)
    except RecursionError:
        raise ValueError("the message is nested too deeply") from None
    if not isinstance(message, dict):
        raise ValueError("the message is not a JSON object")
    return message


def check_beat(message: Mapping[str, object], world: int) -> None:
    """Raise ValueError if a message does not have the form that `Links.message` returns, or contains a rank that is not
    in range(world)."""
    sender = message.get("from")
    end = message.get("end")
    ages = message.get("ages")
    if not (_is_rank(sender, world) and isinstance(end, str) and end in ENDS and _are_ages(ages, world)):
        raise ValueError("its values have wrong types, or name ranks that do not exist")


def check_findings(found: Mapping[str, object], world: int) -> None:
    """Raise ValueError if a message does not have the form that `Links.findings` returns, or contains a rank that is
    not in range(world)."""
    lists = [found.get(name) for name in ("gone", "fine")]
    right = all(isinstance(each, list) and all(_is_rank(host, world) for host in each) for each in lists)
    if not (right and all(_are_ages(found.get(kind), world) for kind in KINDS)):
        raise ValueError("its values have wrong types, or name ranks that do not exist")


def _is_rank(value: object, world: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < world


def _are_ages(value: object, world: int) -> bool:
    """Return True if a value is a dictionary that maps ranks, as strings, to numbers of seconds."""
    return isinstance(value, dict) and all(
        host.isascii()
        and host.isdigit()
        and len(host) <= len(str(world))
        and int(host) < world
        and isinstance(age, int | float)
        and not isinstance(age, bool)
        and math.isfinite(age)
        for host, age in value.items()
    )


class Ignored:
    """Counter of the UDP datagrams that a process ignores. The first ignored datagram is reported on standard error."""

    def __init__(self, here: str) -> None:
        self.here, self.count = here, 0

    def add(self, sender: Address, why: ValueError) -> None:
        """Count a datagram."""
        self.count += 1
        if self.count == 1:
            place = f"{sender[0]} port {sender[1]}"
            self._say(f"ignored a UDP datagram from {place}: {why}. Further messages are ignored and counted")

    def close(self) -> None:
        """Report the number of ignored datagrams if there is more than one."""
        if self.count > 1:
            self._say(f"ignored {self.count} UDP datagrams that were not heartbeats of this run")

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the disk with the log may be full
            print(f"{self.here}: {text}", file=sys.stderr, flush=True)


def watched(hosts: Iterable[int], here: int) -> set[int]:
    """Return the hosts that the host `here` watches. With at most `FULL_MESH` hosts, each host watches all other hosts.
    With more hosts, each host watches the hosts at distances 1, 2, 4, ... in both directions on a ring, for example 14
    of 128 hosts. Each host is also watched by other hosts."""
    ring = sorted({*hosts, here})
    if len(ring) <= FULL_MESH:
        return set(ring) - {here}
    place, distances = ring.index(here), [1 << power for power in range((len(ring) // 2).bit_length())]
    return {ring[(place + sign * distance) % len(ring)] for distance in distances for sign in (1, -1)} - {here}


@dataclass
class Peer:
    """Information that this host has about another host. Times are in seconds on this host's clock."""

    address: Address
    since: float
    """Time at which the other host's address became known."""

    heard: float | None = None
    """Time at which the last message from the other host arrived; None before the first message."""

    hears: float | None = None
    """Seconds since the other host last received a message from this host, as stated in the other host's last message.
    None if the other host had received no message from this host."""

    end: str = ""
    """How the run on the other host ended; empty while the run continues. `bye` means that the run ended without a
    failure, and `failed` means that it ended with a failure. `lost` means that the other host lost contact with the
    rest of the hosts. `gone` means that the first rank of the other host died without a report."""

    ended: float = 0.0
    """Time at which the other host reported that the run had ended there."""


class Links:
    """Table of the other hosts with which this host exchanges heartbeats. A host is identified by its first rank."""

    def __init__(self, here: int, timeout: float) -> None:
        self.here = here
        self.timeout = timeout
        self.peers = dict[int, Peer]()

    def know(self, host: int, address: Address, now: float) -> None:
        """Store the address of another host, unless an address is already stored."""
        if host != self.here and host not in self.peers:
            self.peers[host] = Peer(address, now)

    def hear(self, message: dict[str, Any], address: Address, now: float) -> None:
        """Update the state of another host from its message."""
        self.know(message["from"], address, now)
        peer = self.peers[message["from"]]
        if message["end"] and not peer.end:
            peer.end, peer.ended = message["end"], now
        peer.address, peer.heard = address, now
        peer.hears = message["ages"].get(str(self.here))

    def message(self, now: float, end: str = "") -> dict[str, object]:
        """Return the heartbeat message that this host sends to other hosts. The message states for each other host how
        many seconds ago a message from that host last arrived."""
        ages = {str(host): round(now - peer.heard, 2) for host, peer in self.peers.items() if peer.heard is not None}
        return {"from": self.here, "ages": ages, "end": end}

    def targets(self, now: float) -> list[Address]:
        """Return the addresses of the hosts to which this host sends messages. These are the hosts that it watches and
        the hosts that watch it."""
        own = watched(self.peers, self.here)
        return [
            peer.address
            for host, peer in self.peers.items()
            if host in own or (peer.heard is not None and now - peer.heard < self.timeout)
        ]

    def stood_still(self, seconds: float, now: float) -> None:
        """Correct all times after this process was suspended for `seconds`, so that this time does not count as silence
        of other hosts. Discard what other hosts have reported about silence of this host."""
        for peer in self.peers.values():
            peer.since, peer.ended = min(now, peer.since + seconds), min(now, peer.ended + seconds)
            peer.heard = None if peer.heard is None else min(now, peer.heard + seconds)
            peer.hears = peer.hears if peer.end else None

    def findings(self, now: float) -> dict[str, Any]:
        """Return the states of the hosts that this host watches, as a dictionary with one entry per state. The entries
        `silent`, `deaf`, `unheard`, `failed` and `over` map hosts to the seconds that the state has lasted. `unheard`
        means that no message has ever arrived from a host. `failed` means that the run on a host failed more than
        `LINGER` seconds ago. `over` means that the run on a host ended without a failure. `gone` lists the hosts whose
        first rank died without a report, and `fine` lists the hosts without a problem. If no host has a problem, only
        `fine` is not empty."""
        found: dict[str, Any] = {kind: dict[int, float]() for kind in KINDS} | {"gone": [], "fine": []}
        ages: dict[str, dict[int, float]] = {"silent": {}, "deaf": {}, "unheard": {}}
        parted = False  # True if another host has ended because it received nothing from this host
        for host in sorted(watched(self.peers, self.here)):
            peer = self.peers[host]
            if peer.end == "lost" and (peer.hears or 0.0) > self.timeout - SLACK:
                ages["deaf"][host], parted = peer.hears or 0.0, True
            elif peer.end:
                found["gone"] += [host] if peer.end == "gone" else []
                if peer.end == "bye":
                    found["over"][host] = now - peer.ended
                elif now - peer.ended > LINGER:
                    found["failed"][host] = now - peer.ended
            elif peer.heard is None:
                ages["unheard"][host] = now - peer.since
            elif now - peer.heard > self.timeout - SLACK:
                ages["silent"][host] = now - peer.heard
            elif peer.hears is not None and peer.hears > self.timeout:
                ages["deaf"][host] = peer.hears
            else:
                found["fine"].append(host)
        if parted or max([*ages["silent"].values(), *ages["deaf"].values()], default=0.0) > self.timeout:
            found |= {kind: ages[kind] for kind in ("silent", "deaf")}
        found["unheard"] = {host: age for host, age in ages["unheard"].items() if age > self.timeout}
        return found


class Heartbeat:
    """Main loop of the heartbeat process, which exchanges messages with other hosts and reports findings to the ranks
    on this host."""

    def __init__(self, parent: int, links: Links, world: int, family: int) -> None:
        self.parent = parent
        self.links = links
        self.world = world
        self.token, self.ears = "", list[int]()
        self._network = socket.socket(family, socket.SOCK_DGRAM)
        self._network.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._network.bind(("", 0))
        self._network.setblocking(False)
        self.port: int = self._network.getsockname()[1]
        self._doors = list[socket.socket]()
        """List with a single socket, which accepts TCP connections. A TCP connection shows that this host is alive even
        if UDP datagrams from this host do not arrive. If another program uses the port, the list is empty, and that
        program accepts connections instead."""

        with suppress(OSError):
            self._doors.append(socket.create_server(("", self.port), family=socket.AddressFamily(family)))
            self._doors[0].setblocking(False)
        self._loopback = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._orders = b""
        self._ignored = Ignored(f"heartbeat of rank {links.here} on {socket.gethostname()}, port {self.port}")

    def serve(self) -> None:
        """Send heartbeats until the first rank of this host requests the end or has ended."""
        last = time.monotonic()
        while True:
            inputs: list[socket.socket | int] = [self._network, *self._doors, 0]
            readable = select.select(inputs, [], [], max(0.0, last + BEAT - time.monotonic()))[0]
            now = time.monotonic()
            if now - last > PAUSE:
                self._receive(now)  # messages that arrived while this process was suspended count as received now
                self.links.stood_still(now - last, now)
            else:
                self._receive(now)
            self._answer_doors()
            end = self._obey(now) if 0 in readable else ""
            if os.getppid() != self.parent:
                end = end or "gone"
            if end:
                return self._part(end)
            if now - last >= BEAT:
                last = now
                self._send(self.links.message(now), now)
                self._tell(self.links.findings(now))

    def _receive(self, now: float) -> None:
        for _ in range(BURST):
            try:
                data, sender = self._network.recvfrom(65536)
            except BlockingIOError:
                return
            except ConnectionError:
                continue  # the error belongs to an earlier message to a process that does not exist
            if not self.token:
                continue  # messages cannot be verified before the token is known
            try:
                message = unseal(self.token, data)
                check_beat(message, self.world)
            except ValueError as error:
                self._ignored.add(sender, error)
            else:
                self.links.hear(message, sender, now)

    def _answer_doors(self) -> None:
        """Accept and close all waiting connections. Otherwise, the kernel's queue of connections would fill up."""
        for door in self._doors:
            with suppress(OSError):  # no connection is waiting, or the other end has closed it
                for _ in range(BURST):
                    door.accept()[0].close()

    def _obey(self, now: float) -> str:
        data = os.read(0, 1 << 20)
        *lines, self._orders = (self._orders + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            self.token, self.ears = order.get("token", self.token), order.get("ears", self.ears)
            for host, address in order.get("hosts", {}).items():
                self.links.know(int(host), tuple(address), now)
            if end := order.get("end"):
                return str(end)
        return "" if data else "gone"

    def _send(self, message: Mapping[str, object], now: float) -> None:
        data = seal(self.token, message)
        for address in self.links.targets(now):
            with suppress(OSError):  # without a link or route, nothing is sent, and the other host reports the silence
                self._network.sendto(data, address)

    def _tell(self, findings: Mapping[str, object]) -> None:
        if any(findings[kind] for kind in (*KINDS, "gone")):
            data = seal(self.token, findings)
            for port in self.ears:
                with suppress(OSError):
                    self._loopback.sendto(data, ("127.0.0.1", port))

    def _part(self, end: str) -> None:
        for _ in range(FAREWELLS):
            now = time.monotonic()
            self._send(self.links.message(now, end), now)
            time.sleep(0.02)
        self._ignored.close()


def main() -> None:
    parent, here, world, timeout, family = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # only the ranks handle these signals
    heartbeat = Heartbeat(int(parent), Links(int(here), float(timeout)), int(world), int(family))
    print(heartbeat.port, flush=True)
    heartbeat.serve()


if __name__ == "__main__":
    main()
