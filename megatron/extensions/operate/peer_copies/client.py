"""Client of holder processes. A holder is a process on each host that serves the copies of the training state in the
host's memory (`holder`). A client starts the holder of its host, sends parts of the training state to other holders,
and reads parts from holders.

This module does not import torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, BinaryIO, cast

from megatron.core.dist_checkpointing.file_storage import located, resolved
from megatron.extensions.operate.peer_copies.holder import ABOUT, CHUNK, read_exactly

PROGRAM = Path(__file__).with_name("holder.py")
HOST = "PEER_COPY_HOST"
"""Environment variable that overrides the name of a rank's host for the placement of copies. Ranks on one machine count
as ranks on several hosts if their names differ."""

OPENS = 120.0
"""Maximum time in seconds that a new holder process may take to start."""

ABANDONED = 3600.0
"""If the holder process of a folder has ended, the copies in the folder are deleted after this number of seconds
without a write."""

RESPONDS = 5.0
"""Maximum time in seconds to wait until a holder process accepts a connection and answers a request. Accepting a
connection does not show that a holder is alive, because the kernel also accepts connections for a stopped process."""

ANSWER = 10.0
"""Maximum time in seconds to wait until a holder process receives or sends a chunk of data."""


def host_name() -> str:
    """Return the name of this host for the placement of copies."""
    return os.environ.get(HOST) or socket.gethostname()


def folder_of(memory: str, save: str | PurePath) -> Path:
    """Return this host's folder for the copies of a run. The folder is in the file system `memory`, and the name of the
    folder depends on --save."""
    digest = hashlib.sha256(f"{resolved(located(save))}\n{host_name()}".encode()).hexdigest()[:16]
    return Path(memory) / f"megatron-copies-{os.getuid()}-{digest}"


@dataclass(frozen=True)
class Address:
    """Network address and token of a holder process, which serves the copies on a host."""

    host: str
    address: str
    port: int
    token: str


def open_holder(folder: Path, keep: float) -> Address:
    """Return the address of this host's holder process. If there is no holder, or if the holder does not answer, start
    a new one. Raises OSError if no holder can be started."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    with _opening(folder):
        try:
            found = address_in(folder)
            reached(found).close()
            return found
        except (OSError, ValueError, KeyError):
            _end_silent(folder)
        return _started(folder, keep)


@contextmanager
def _opening(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder in the `with` block, so that only one process of this host at a time looks for the
    holder process or starts one. Raises OSError if the folder cannot be locked."""
    descriptor, limit = os.open(folder, os.O_RDONLY), time.monotonic() + OPENS
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > limit:
                    raise
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def address_in(folder: Path) -> Address:
    """Read the address of the holder process that serves the copies in a folder. Raises OSError, ValueError or KeyError
    if there is no valid address."""
    about = json.loads((folder / ABOUT).read_text())
    return Address(host_name(), about["address"], int(about["port"]), about["token"])


def _end_silent(folder: Path) -> None:
    """Kill a holder process that does not answer, for example because a signal has stopped it. The copies remain,
    because they are stored as files."""
    with suppress(OSError, ValueError, KeyError):
        pid = int(json.loads((folder / ABOUT).read_text())["pid"])
        if os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            os.kill(pid, signal.SIGKILL)
            why = f"did not answer within {RESPONDS:g} s; it is ended with SIGKILL and replaced"
            print(f" the holder of copies on {host_name()} {why}", file=sys.stderr, flush=True)


def _started(folder: Path, keep: float) -> Address:
    """Start the holder process of this host, and return its address. Raises OSError if the holder does not start."""
    words = [sys.executable, "-I", "-S", str(PROGRAM), str(folder), own_address(), str(keep)]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd="/",
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # saves memory: by default, malloc creates an arena for each thread
        text=True,
    )
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], OPENS)[0]:
        process.kill()
        raise OSError(f"the holder of copies did not start: {' '.join(words)} was not ready after {OPENS:g} s")
    if process.stdout.readline() != "ready\n":
        raise OSError(f"the holder of copies did not start: {' '.join(words)} ended with {process.wait()}")
    process.stdout.close()
    process.returncode = 0  # the holder outlives this process, so prevent Popen's warning that it still runs
    return address_in(folder)


def drop_abandoned(own: Path, keep: float) -> None:
    """Delete copies that other runs of this user have left behind. Copies are left behind if their holder process was
    killed, for example by SLURM at the end of a job. Copies are kept for `keep` or `ABANDONED` seconds after the last
    write, whichever is longer."""
    for folder in own.parent.glob(f"megatron-copies-{os.getuid()}-*"):
        with suppress(OSError):
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
            if folder != own and time.time() - newest > max(keep, ABANDONED) and not _has_holder(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _has_holder(folder: Path) -> bool:
    """Return True if a holder process serves the copies in a folder."""
    try:
        Link(address_in(folder)).close()
    except (OSError, ValueError, KeyError):
        return False
    return True


def own_address() -> str:
    """Return the address of this host in the network that connects the host with the store."""
    store = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "9"))
    family, kind, _, _, target = socket.getaddrinfo(*store, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(target)
        return str(way.getsockname()[0])


class HolderError(OSError):
    """Raised if a holder process refuses a request or is lost."""


class RefusedError(HolderError):
    """Raised if a holder process refuses a request. A retry of the request would also be refused."""


class Pace:
    """Limit on the number of bytes that are sent per second. If `rate` is None, there is no limit."""

    def __init__(self, rate: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate, self._clock = rate, clock
        self._free_at = 0.0

    def wait(self, nbytes: int) -> float:
        """Return how many seconds to wait before sending the next `nbytes` bytes, and count these bytes as sent."""
        if self.rate is None:
            return 0.0
        now = self._clock()
        pause = max(0.0, self._free_at - now)
        self._free_at = max(now, self._free_at) + nbytes / self.rate
        return pause


class Link:
    """Connection to a holder process, which serves the copies on a host. All methods of this class raise OSError if the
    holder is lost or refuses a request."""

    def __init__(self, to: Address) -> None:
        self.to = to
        self._socket = socket.create_connection((to.address, to.port), timeout=RESPONDS)
        self._socket.settimeout(ANSWER)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = cast("BinaryIO", self._socket.makefile("rb"))

    def put(self, generation: str, name: str, header: bytes, data: memoryview, pace: Pace) -> None:
        """Send a part of the training state to the holder process, which stores the part on its host. Return after the
        holder has stored the whole part."""
        self._ask(op="put", generation=generation, name=name, header=len(header), nbytes=len(data))
        self._socket.sendall(header)
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            time.sleep(pace.wait(len(chunk)))
            self._socket.sendall(chunk)
        self._answer()

    def get(self, generation: str, name: str, start: int, into: memoryview) -> None:
        """Read bytes of a part of the training state into the buffer `into` until the buffer is full. The first byte is
        at the offset `start`."""
        self._ask(op="get", generation=generation, name=name, start=start, length=len(into))
        self._answer()
        read_exactly(self._stream, into)
        self._answer()

    def header(self, generation: str, name: str) -> bytes:
        """Read the header of a part of the training state from the holder process."""
        self._ask(op="header", generation=generation, name=name)
        content = bytearray(int(self._answer()["length"]))
        read_exactly(self._stream, memoryview(content))
        self._answer()
        return bytes(content)

    def hello(self) -> None:
        """Wait for an answer from the holder, for at most `RESPONDS` seconds."""
        self._socket.settimeout(RESPONDS)
        self._ask(op="hello")
        self._answer()
        self._socket.settimeout(ANSWER)

    def lease(self) -> None:
        """Register this process with the holder process as a running rank, until the connection is closed or this
        process ends."""
        self._ask(op="lease")
        self._answer()

    def end(self) -> None:
        """End the holder process, which then deletes all copies."""
        self._ask(op="end")
        self._answer()

    def close(self) -> None:
        """End the connection."""
        self._stream.close()
        self._socket.close()

    def _ask(self, **request: object) -> None:
        self._socket.sendall(json.dumps({"token": self.to.token, **request}).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        line = self._stream.readline(1 << 16)
        if not line:
            raise HolderError(f"the holder of {self.to.host} has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RefusedError(f"the holder of {self.to.host}: {answer['error']}")
        return cast("dict[str, Any]", answer)


def reached(holder: Address) -> Link:
    """Connect to a holder process, and return the connection after the holder has answered. Raises OSError if the
    holder does not answer within `RESPONDS` seconds."""
    try:
        link = Link(holder)
        try:
            link.hello()
        except BaseException:
            link.close()
            raise
    except TimeoutError:
        raise HolderError(f"the holder of {holder.host} did not answer within {RESPONDS:g} s") from None
    return link


def opened(folder: Path, keep: float) -> tuple[Address, Link]:
    """Return the address of this host's holder process, and a connection to this process. If no holder answers, start a
    new one first. While the connection is open, this process is registered as a rank. Raises OSError if no holder can
    be started."""
    for _ in range(2):
        with suppress(OSError):  # retry if the holder ended before the connection was opened
            return (found := open_holder(folder, keep)), leased(found)
    return (found := open_holder(folder, keep)), leased(found)


def leased(holder: Address) -> Link:
    """Open a connection to a holder process. While the connection is open, this process is registered as a rank of the
    holder's host."""
    link = reached(holder)
    link.lease()
    return link


GENERATION = re.compile(r"g(\d{6})-[0-9a-f]{8}")


def number_of(generation: str) -> int:
    """Parse the number of a generation of copies from the name of its folder. Return 0 if the name has another form."""
    match = GENERATION.fullmatch(generation)
    return int(match[1]) if match else 0
