"""S3 server on loopback, with a proxy whose connections fail."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf

SERVE = """
import sys, time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
time.sleep(1e6)
"""
BUCKET = "bucket"


def credentials(port: int) -> dict[str, str]:
    """Return the environment variables for a client of the server on `port`."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def environment(added: Mapping[str, str]) -> Iterator[None]:
    """Add variables to this process's environment within the context."""
    before = dict(os.environ)
    os.environ.update(added)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def s3_server() -> Iterator[int]:
    """Start a server with an empty `BUCKET`, and yield its port."""
    with subprocess.Popen([sys.executable, "-c", SERVE, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        try:
            port = int(run.stdout.readline())
            with environment(credentials(port)):
                file_system().call_s3("create_bucket", Bucket=BUCKET)
            yield port
        finally:
            run.kill()


def file_system():  # type: ignore[no-untyped-def]
    """Return fsspec's file system for the server that the environment variables describe."""
    import fsspec

    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


@dataclass
class Faults:
    """Faults that a proxy injects into its connections. `seed` determines where connections are cut."""

    seed: int
    cut: float = 0.0
    """Probability that a connection is cut within its next few hundred KiB."""

    late: float = 0.0
    """Probability that the proxy delays the data that the client of a connection sends. The delayed data arrive even if
    the client dies."""

    longest_hold: float = 3.0
    """Longest delay of a client's data, in seconds."""

    stall_after: float = inf
    """Number of bytes, counted over all connections, after which the proxy stops reading from one connection. The proxy
    keeps this connection open."""

    down_until: float = 0.0
    """Value of `time.monotonic()` until which the proxy refuses connections."""

    moved: int = 0
    cuts: int = 0
    held: int = 0
    generator: random.Random = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.generator = random.Random(self.seed)

    def hold(self) -> float:
        """Return the delay in seconds for the data that the client of a new connection sends."""
        with self.lock:
            if not self.late or self.generator.random() >= self.late:
                return 0.0
            self.held += 1
            return self.longest_hold * self.generator.random()

    def limit(self) -> float:
        """Return the number of bytes after which a new connection is cut."""
        with self.lock:
            if self.generator.random() >= self.cut:
                return float("inf")
            return float(self.generator.choice([0, 100, 1000, 100_000, 400_000]) * self.generator.random())


@contextmanager
def faulty_proxy(port: int, faults: Faults) -> Iterator[int]:
    """Start a proxy for the server at `port`, and yield the proxy's port."""
    with closing(socket.create_server(("127.0.0.1", 0), backlog=128)) as listener:
        threading.Thread(target=_accept, args=(listener, port, faults), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, port: int, faults: Faults) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            if time.monotonic() < faults.down_until:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", port))
            left = [faults.limit()]
            for source, sink, hold in ((client, server, faults.hold()), (server, client, 0.0)):
                threading.Thread(target=_pump, args=(source, sink, left, faults, hold), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, left: list[float], faults: Faults, hold: float) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            if hold and len(data) < 1 << 16:  # a piece shorter than the buffer is probably the last piece of a request
                time.sleep(hold)
                hold = 0.0
            with faults.lock:
                faults.moved += len(data)
                stalls = faults.moved > faults.stall_after
                if stalls:
                    faults.stall_after = inf
            if stalls:
                threading.Event().wait()
            if left[0] < len(data) or time.monotonic() < faults.down_until:
                with faults.lock:
                    faults.cuts += 1
                sink.sendall(data[: int(min(left[0], len(data) - 1))])
                break
            left[0] -= len(data)
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
