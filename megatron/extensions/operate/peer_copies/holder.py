"""Holder: a small process on each host that serves the host's copies of the training state to other hosts. A holder
outlives the ranks.

The copies are files in an in-memory folder (/dev/shm), so they outlive even the holder. The ranks of a host write their
own copies directly to these files:

    FOLDER/holder.json: port and token of the holder.
    FOLDER/GENERATION/world.json: names of all parts that a complete set of copies of this generation has.
    FOLDER/GENERATION/PART.SLOT: bytes of a part of the training state.
    FOLDER/GENERATION/PART.SLOT.json: header of the part, present only while the bytes are complete.

Each time the ranks are started, their copies form a new generation with its own folder. A process that was suspended
and continues to write after a restart can therefore not change the copies of the new generation. Each part has two
files, called slots, so that one file is complete while the other file is being written.

This module imports neither torch nor this package. Any process that can reach the port can connect. Therefore, each
request must contain the token of the holder, and file names in requests are validated. The holder deletes all copies
and exits on request, or if no rank of its host has been connected for KEEP seconds.

Usage:

    python -I -S holder.py FOLDER ADDRESS KEEP
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import shutil
import socket
import socketserver
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

CHUNK = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*(\.[01])?")
ABOUT, WORLD = "holder.json", "world.json"
FIRST = 300.0
"""Minimum number of seconds that a new holder waits for the first rank."""

STALLED = 300.0
"""If no data arrives from a sender for this number of seconds, the sender is considered lost, for example because its
host has failed."""

LONGEST = 1 << 20
"""Maximum size in bytes of a request line."""


def header_of(path: Path) -> Path:
    """Return the path of the header file that belongs to a file with copied bytes."""
    return path.with_name(f"{path.name}.json")


def write_whole(path: Path, text: str | bytes) -> None:
    """Write a file atomically, so that readers never see a partial file."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_bytes(text.encode() if isinstance(text, str) else text)
    os.replace(beside, path)


def make_room(path: Path, nbytes: int) -> None:
    """Create or resize a file, and allocate its memory. Raises OSError if the folder does not exist or the file system
    is full. If the memory were not allocated in advance, a write to a full file system could store fewer bytes without
    raising an error."""
    with open(path, "r+b" if path.exists() else "w+b") as file:
        os.ftruncate(file.fileno(), nbytes)
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)


def sealed(header: bytes) -> bytes:
    """Return the content of a header file: a checksum followed by the header."""
    return b"%08x\n" % zlib.crc32(header) + header


def unsealed(sealed: bytes) -> dict[str, Any]:
    """Parse the content of a header file. Raises ValueError if the header is damaged."""
    crc, _, text = sealed.partition(b"\n")
    if int(crc, 16) != zlib.crc32(text):
        raise ValueError("a header is damaged")
    return cast("dict[str, Any]", json.loads(text))


def read_header(data: Path) -> dict[str, Any]:
    """Read the header of a data file. Raises OSError if a file cannot be read, and ValueError if the header is damaged
    or belongs to other data."""
    header = unsealed(header_of(data).read_bytes())
    if data.stat().st_size != header["nbytes"]:
        raise ValueError(f"the header of {data} belongs to other data")
    return header


def headers_in(generation: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield a pair (data file, header) for each complete copy in the folder `generation`, which contains the copies
    that were made after one start of the ranks. Each copy contains one part of the training state."""
    for path in sorted(generation.glob("*.[01].json")):
        data = path.with_suffix("")
        with suppress(OSError, ValueError):
            yield data, read_header(data)


class Holder(socketserver.ThreadingTCPServer):
    """TCP server that stores and reads the copies in a folder on behalf of other hosts."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, folder: Path, address: str, keep: float) -> None:
        self.folder, self.keep = folder, keep
        self.token = secrets.token_hex(16)
        self.leases, self.ended = 0, False
        self.free_since = time.monotonic() + max(0.0, FIRST - keep)
        self.lock = threading.Lock()
        self.address_family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        super().__init__((address, 0), Connection)

    def watch(self) -> None:
        """Wait until the holder must exit: on request, after `keep` seconds without a connected rank, or if its folder
        is gone."""
        while True:
            time.sleep(0.2)
            with self.lock:
                idle = not self.leases and time.monotonic() - self.free_since > self.keep
            if self.ended or idle or not self.is_current():
                return

    def is_current(self) -> bool:
        """Return True if the folder exists and no other holder process has taken over the folder."""
        with suppress(OSError, ValueError, KeyError):
            return bool(json.loads((self.folder / ABOUT).read_bytes())["token"] == self.token)
        return False

    def lease(self, change: int) -> None:
        """Add `change`, which is 1 or -1, to the number of connected ranks."""
        with self.lock:
            self.leases += change
            self.free_since = time.monotonic()

    def path(self, request: Mapping[str, Any]) -> Path:
        """Return the path of the copy that a request asks for. Raises ValueError if the name in the request is
        invalid."""
        names = str(request["generation"]), str(request["name"])
        if not all(NAME.fullmatch(name) for name in names):
            raise ValueError(f"not the name of a copy: {names}")
        return self.folder.joinpath(*names)


class Connection(socketserver.StreamRequestHandler):
    """Handler that serves the requests of one connection until the connection is closed."""

    server: Holder

    def handle(self) -> None:
        with suppress(OSError):
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while line := self.rfile.readline(LONGEST):
                try:
                    request = json.loads(line)
                    if not hmac.compare_digest(str(request["token"]), self.server.token):
                        raise ValueError("the token is wrong")
                    answer = getattr(self, f"do_{request['op']}")(request)
                except (AttributeError, KeyError, TypeError, ValueError, OSError) as error:
                    self._answer(error=f"{type(error).__name__}: {error}")
                    return
                self._answer(**answer or {})

    def do_hello(self, request: Mapping[str, Any]) -> None:
        """Answer a request that checks whether this process is running."""

    def do_put(self, request: Mapping[str, Any]) -> None:
        """Store a part of the training state. The sender sends the header and the bytes of the part after the
        request."""
        path = self.server.path(request)
        header_of(path).unlink(missing_ok=True)
        self.connection.settimeout(STALLED)
        header, nbytes = self.rfile.read(int(request["header"])), int(request["nbytes"])
        try:
            make_room(path, nbytes)
        except OSError:
            for _ in self._received(nbytes):  # the sender reads the error only after it has sent all bytes
                pass
            raise
        with open(path, "r+b", buffering=0) as file:
            for data in self._received(nbytes):
                file.write(data)
        self.connection.settimeout(None)
        write_whole(header_of(path), header)

    def do_get(self, request: Mapping[str, Any]) -> None:
        """Answer with the bytes [start, start + length) of a part of the training state. First, send a line that
        contains the number of bytes."""
        start, length = int(request["start"]), int(request["length"])
        with open(self.server.path(request), "rb") as file:
            self._answer(length=length)
            self.connection.sendfile(file, start, length) if length else None

    def do_header(self, request: Mapping[str, Any]) -> None:
        """Answer with the header of a part of the training state. First, send a line that contains the length of the
        header."""
        content = header_of(self.server.path(request)).read_bytes()
        self._answer(length=len(content))
        self.wfile.write(content)

    def do_lease(self, request: Mapping[str, Any]) -> None:
        """Count the client as a connected rank of this host until it closes the connection."""
        self.server.lease(1)
        try:
            self._answer()
            while self.rfile.read1(1):
                pass
        finally:
            self.server.lease(-1)

    def do_end(self, request: Mapping[str, Any]) -> None:
        """End the holder and delete all copies."""
        self.server.ended = True

    def _received(self, nbytes: int) -> Iterator[bytes]:
        """Yield the next `nbytes` bytes from the sender. Raises ValueError if the sender closes the connection before
        all bytes have arrived."""
        while nbytes:
            if not (data := self.rfile.read1(min(nbytes, CHUNK))):
                raise ValueError("the sender has ended")
            nbytes -= len(data)
            yield data

    def _answer(self, **values: object) -> None:
        self.wfile.write(json.dumps(values).encode() + b"\n")


def main(folder: Path, address: str, keep: float) -> None:
    """Serve the copies in a folder until a client requests the end, or until no rank has been connected for `keep`
    seconds. Then delete the folder and exit the process."""
    with Holder(folder, address, keep) as holder:
        about = {"address": address, "port": holder.server_address[1], "token": holder.token, "pid": os.getpid()}
        write_whole(folder / ABOUT, json.dumps(about))
        with suppress(BrokenPipeError):  # continue without a parent, because restarted ranks find this holder
            print("ready", flush=True)
        threading.Thread(target=holder.serve_forever, daemon=True).start()
        holder.watch()
        if holder.is_current():
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def read_exactly(stream: BinaryIO, into: memoryview) -> None:
    """Read from a stream until the buffer `into` is full. Raises ConnectionError if the stream ends before the buffer
    is full."""
    at = 0
    while at < len(into):
        if not (got := stream.readinto(into[at : at + CHUNK])):  # type: ignore[attr-defined]
            raise ConnectionError("the holder has ended")
        at += got


if __name__ == "__main__":
    os.umask(0o077)
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
