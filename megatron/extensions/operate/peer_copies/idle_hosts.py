"""Copies on hosts without ranks. A launcher process on a host without ranks offers the copies. Ranks on other hosts
find and read the copies. This module does not import torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.extensions.operate.peer_copies.client import (
    Address,
    Link,
    folder_of,
    host_name,
    opened,
    reached,
)
from megatron.extensions.operate.peer_copies.flags import PeerCopyConfig, keeps_copies
from megatron.extensions.operate.peer_copies.holder import write_whole
from megatron.extensions.operate.peer_copies.sets import Inventory, inventory
from megatron.training.config.run_config import RunConfig

NOTE = "idle.json"


@dataclass(frozen=True)
class IdleHost:
    """Host without ranks that offers the copies in its memory."""

    name: str
    holder: Address
    held: Inventory

    def to_json(self) -> str:
        """Serialize this host as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> IdleHost:
        """Restore an `IdleHost` from the text that `to_json` returned."""
        record = json.loads(text)
        return cls(record["name"], Address(**record["holder"]), Inventory.from_record(record["held"]))


def memory_of(config: RunConfig) -> Path | None:
    """Return the folder of a run's copies on this host; None if the run has no copies."""
    root = config.checkpoint.save_root
    if not keeps_copies(config) or root is None:
        return None
    return folder_of(config.options(PeerCopyConfig).peer_copy_path, root)


def offered(config: RunConfig) -> tuple[str, Link | None]:
    """Offer the copies on this host to ranks on other hosts. Return an `IdleHost` as JSON text, and an open connection
    that keeps the holder process of this host alive. If the host has no copies, the text is empty and the connection is
    None."""
    folder = memory_of(config)
    with suppress(OSError):
        if folder is not None and any(folder.glob("g*")):
            holder, lease = opened(folder, 60 * config.options(PeerCopyConfig).peer_copy_keep_minutes)
            return IdleHost(host_name(), holder, inventory(folder, host_name())).to_json(), lease
    return "", None


def leave_note(config: RunConfig, offers: Iterable[str]) -> None:
    """Write `offers` to a file. Each offer is a text that `offered` returned on a host without ranks. The ranks of this
    host read the file when they start."""
    folder = memory_of(config)
    if folder is not None and folder.is_dir():
        write_whole(folder / NOTE, json.dumps([offer for offer in offers if offer]))


def read_note(folder: Path) -> tuple[IdleHost, ...]:
    """Read the file that `leave_note` wrote, and delete it. Return the hosts without ranks whose holder processes
    answer."""
    found: tuple[IdleHost, ...] = ()
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = tuple(map(IdleHost.from_json, json.loads((folder / NOTE).read_bytes())))
    (folder / NOTE).unlink(missing_ok=True)
    return tuple(filter(_answers, found))


def _answers(host: IdleHost) -> bool:
    try:
        reached(host.holder).close()
    except OSError as error:
        print(f" copies on {host.name} are not used: {error}", file=sys.stderr, flush=True)
        return False
    return True
