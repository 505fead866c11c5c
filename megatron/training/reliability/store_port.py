"""Explain why the ranks' store cannot be reached. This module does not import torch.

A rank that cannot reach the store can observe only the state of the store's port. If the rank that opens the store
failed on the same host, it has recorded its failure in a file, which this rank reads (`left_failure`).
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from megatron.training.reliability.child_processes import own_start_time
from megatron.training.reliability.untrusted import parse_json

CLOCK = time.CLOCK_BOOTTIME
"""Clock that all processes of a host share. Unlike the system time, this clock is never adjusted."""

IMPORTED = time.clock_gettime(CLOCK)

BANNER = 1.0
"""Seconds to wait for data from the program on the port. Within this time, a mail or SSH server has sent its greeting,
whereas a store sends nothing."""

SHOWN = 60
"""Maximum number of bytes received from the port that a message shows."""


class ForeignPortError(ConnectionError):
    """Raised if waiting for the store is pointless, because another program uses the port or the rank that opens the
    store has failed."""


def leave_failure(address: str, port: int, why: str) -> None:
    """Record why this rank cannot open the store. Ranks on this host that the same launcher started read this
    record."""
    with suppress(OSError):
        path = _place(address, port)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps({"parent": os.getppid(), "at": time.clock_gettime(CLOCK), "why": why}))
        os.replace(scratch, path)


def left_failure(address: str, port: int) -> str | None:
    """Return the reason that `leave_failure` has recorded since this process started, or None if there is none.

    A record is ignored if it is older than this process, or if it was written under another launcher or by another
    user.
    """
    path = _place(address, port)
    try:
        mine = path.parent.stat().st_uid == path.lstat().st_uid == os.getuid() and not path.is_symlink()
        left = parse_json(path.read_text()) if mine else None
    except (OSError, ValueError):
        return None
    if not isinstance(left, dict) or left.get("parent") != os.getppid():
        return None
    at, why = left.get("at"), left.get("why")
    return why if isinstance(at, float) and at >= _started() and isinstance(why, str) else None


def _started() -> float:
    """Return the time at which this process started, on the clock `CLOCK`. A forked process may start later than
    `IMPORTED`."""
    try:
        return own_start_time()
    except ValueError:
        return IMPORTED


def _place(address: str, port: int) -> Path:
    name = "".join(character if character.isalnum() else "_" for character in f"{address}_{port}")
    return Path(tempfile.gettempdir()) / f"paritrain-{os.getuid()}" / f"store-{name[:100]}.json"


def describe_port(address: str, port: int) -> str:
    """Describe the current state of the store's port. Raises ForeignPortError if the program that listens on the port
    sends data first, because no store does so. If the program sends nothing, it may be a store on a busy host."""
    try:
        with socket.create_connection((address, port), timeout=2.0) as connection:
            connection.settimeout(BANNER)
            try:
                said = connection.recv(SHOWN)
            except TimeoutError:
                said = b""
            if said:
                raise ForeignPortError(f"another program uses the port: it sends {said!r}")
            return "a program listens there, but it has not answered like a store yet"
    except ConnectionRefusedError:
        return "nothing listens there yet; rank 0 opens it once it has started"
    except ForeignPortError:
        raise
    except OSError as error:
        return f"it cannot be reached ({error.strerror or error})"
