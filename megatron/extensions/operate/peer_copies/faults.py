"""Records of the failure that ended a run's processes, and the report of the recovery after the next start.

This module does not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.extensions.operate.peer_copies.holder import write_whole

NOTE = "fault.json"

RUNG = "RUNG_IN_JOB"
"""Environment variable that states how the processes for a restart within the job were found."""

SAME_RANKS, SPARES = "restart in the job", "spare ranks in the job"
FEWER_RANKS = "another layout in the job"
BY_LAUNCHER = "restart by the launcher"


@dataclass(frozen=True)
class Fault:
    """Failure, as recorded by a rank that ended because of it."""

    what: str
    who: str
    at: float
    """Time of the failure, or of the failed rank's last sign of life, in seconds since 1970."""

    noticed: float
    """Time at which this host's ranks detected the failure and ended, in seconds since 1970."""

    iteration: int
    """Last completed iteration."""


def write_fault(folder: Path, fault: Fault) -> None:
    """Record a failure for the next start. If several ranks of a host record one, the last record remains."""
    write_whole(folder / NOTE, json.dumps(asdict(fault)))


def note_death(folder: Path, who: str, how: str, iteration: int, since: float) -> None:
    """Record, in the parent process of a rank, that the rank has ended without a report. Do nothing if a rank of this
    host has recorded a failure since that rank was started.

    Surviving ranks record the failure themselves. If the kernel kills all ranks at once because the host is out of
    memory, only their parents can do so.

    Args:
        folder: The copies of this host.
        who: The rank.
        how: Signal or exit code.
        iteration: Last completed step.
        since: Start time of the rank, in seconds since 1970.
    """
    known, now = read_fault(folder), time.time()
    if folder.is_dir() and (known is None or known.noticed < since):
        write_fault(folder, Fault(f"ended by {how}", who, now, now, iteration))


def read_fault(folder: Path) -> Fault | None:
    """Read the record of an earlier start; None if there is none."""
    with suppress(OSError, ValueError, TypeError):
        return Fault(**json.loads((folder / NOTE).read_bytes()))
    return None


def drop_fault(folder: Path) -> None:
    """Delete the record."""
    (folder / NOTE).unlink(missing_ok=True)


def first_fault(faults: Iterable[Fault | None]) -> Fault | None:
    """Combine the records of all hosts: the earliest failure, with the earliest detection and the latest completed
    step."""
    known = [fault for fault in faults if fault is not None]
    if not known:
        return None
    first = min(known, key=lambda fault: fault.at)
    noticed, iteration = min(fault.noticed for fault in known), max(fault.iteration for fault in known)
    return Fault(first.what, first.who, first.at, noticed, iteration)


@dataclass(frozen=True)
class Recovery:
    """Recovery of a run from a failure."""

    fault: Fault
    rung: str
    """How the ranks were restarted: one of the rungs named in this module."""

    source: str
    """Source of the state: `copies in memory`, `checkpoint on disk`, or `the beginning` if there is neither."""

    why: str
    """Reason why the state was not loaded from memory; empty if it was, or if there were never any copies."""

    def record(self, now: float, resumed: int) -> dict[str, object]:
        """Return the event for `run_events.jsonl`, after the first step of a run that resumed at iteration `resumed`.
        Times are in seconds after the failure."""
        fault = self.fault
        return {
            "what": fault.what,
            "who": fault.who,
            "detected_after": round(max(0.0, fault.noticed - fault.at), 3),
            "recovered_after": round(now - fault.at, 3),
            "steps_lost": max(0, fault.iteration - resumed),
            "rung": self.rung,
            "source": self.source,
        } | ({"why": self.why} if self.why else {})

    def line(self, now: float, resumed: int) -> str:
        """Return the recovery as a log line."""
        record = self.record(now, resumed)
        why = f" ({self.why})" if self.why else ""
        return (
            f"recovered by {self.rung} from {self.source}{why}: {self.fault.who}, {self.fault.what}, detected after "
            f"{record['detected_after']} s, the next step made after {record['recovered_after']} s, steps lost: "
            f"{record['steps_lost']}"
        )
