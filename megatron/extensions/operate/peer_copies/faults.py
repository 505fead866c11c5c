"""Records of the failure that ended the ranks of a run, and a report on the recovery after the restart.

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
"""Environment variable through which a parent process (`job_restarts`) passes the recovery method, such as `SPARES`, to
its rank."""

SAME_RANKS, SPARES = "restart in the job", "spare ranks in the job"
FEWER_RANKS = "another layout in the job"
BY_LAUNCHER = "restart by the launcher"


@dataclass(frozen=True)
class Fault:
    """Failure of a run, as recorded on one host."""

    what: str
    who: str
    at: float
    """Time of the failure, or of the failed rank's last sign of life, in seconds since 1970."""

    noticed: float
    """Time in seconds since 1970 at which the ranks of this host detected the failure and ended."""

    iteration: int
    """Last completed iteration."""


def write_fault(folder: Path, fault: Fault) -> None:
    """Record a failure, so that the ranks can report it after a restart. If several ranks of a host record a failure,
    the last record is kept."""
    write_whole(folder / NOTE, json.dumps(asdict(fault)))


def note_death(folder: Path, who: str, how: str, iteration: int, since: float) -> None:
    """Record the failure of a rank that ended without recording its failure. The parent process of the rank calls this
    function. If a rank of this host has recorded a failure since `since`, do nothing. Usually, the surviving ranks
    record the failure. If the kernel kills all ranks of a host because memory is exhausted, only the parents of the
    ranks can record the failure.

    Args:
        folder: Folder in which this host stores copies.
        who: Name of the rank that has ended.
        how: Signal or exit code with which the rank ended.
        iteration: Last completed iteration.
        since: Time at which the rank started, in seconds since 1970.
    """
    known, now = read_fault(folder), time.time()
    if folder.is_dir() and (known is None or known.noticed < since):
        write_fault(folder, Fault(f"ended by {how}", who, now, now, iteration))


def read_fault(folder: Path) -> Fault | None:
    """Read the failure that was recorded before a restart; None if there is none."""
    with suppress(OSError, ValueError, TypeError):
        return Fault(**json.loads((folder / NOTE).read_bytes()))
    return None


def drop_fault(folder: Path) -> None:
    """Delete the record of a failure, if there is one."""
    (folder / NOTE).unlink(missing_ok=True)


def first_fault(faults: Iterable[Fault | None]) -> Fault | None:
    """Combine the failures that the hosts have recorded into a single failure. The combined failure has the description
    of the earliest failure, the earliest detection time, and the latest completed iteration."""
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
    """Method by which the ranks were started again. The value is one of this module's constants, such as `SPARES`."""

    source: str
    """Source of the loaded training state: `copies in memory` or `checkpoint on disk`. The value is `the beginning` if
    no state was loaded."""

    why: str
    """Reason why the state was not loaded from copies in memory; empty if it was loaded from copies or if there were no
    copies."""

    def record(self, now: float, resumed: int) -> dict[str, object]:
        """Return the recovery as an event for `run_events.jsonl`. The event is recorded after the first step of a run
        that resumed at iteration `resumed`. The times in the event are in seconds after the failure."""
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
        """Return a log line that describes the recovery."""
        record = self.record(now, resumed)
        why = f" ({self.why})" if self.why else ""
        return (
            f"recovered by {self.rung} from {self.source}{why}: {self.fault.who}, {self.fault.what}, detected after "
            f"{record['detected_after']} s, the next step completed after {record['recovered_after']} s, steps lost: "
            f"{record['steps_lost']}"
        )
