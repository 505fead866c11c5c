"""Processor time of ranks that share a core, divided by the kernel: each has a fixed share, whether the others work or
wait, as a GPU has. Without it a rank that waits leaves its half of the core to its neighbour."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

V1, V2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
QUOTA_US = 1000
"""What a process may run at a stretch: short beside a step, long beside what a switch between processes costs."""


@contextmanager
def cpu_shares(count: int, share: float) -> Iterator[list[Path]]:
    """Control groups of processes that get `share` of a core each; none where this machine has no such groups. `join`
    enters one."""
    made: list[Path] = []
    try:
        with suppress(OSError):
            for place in range(count):
                made.append(_made(f"box-{os.getpid()}-{place}", share))
        yield made if len(made) == count else []
    finally:
        for group in made:
            with suppress(OSError):
                group.rmdir()


def join(group: Path) -> None:
    """Moves this process into a control group."""
    (group / "cgroup.procs").write_text("0")


def _made(name: str, share: float) -> Path:
    root = V1 if (V1 / "cpu.cfs_quota_us").exists() or not (V2 / "cgroup.controllers").exists() else V2
    _sweep(root)
    group, period = root / name, int(QUOTA_US / share)
    group.mkdir()
    try:
        if root is V1:
            (group / "cpu.cfs_period_us").write_text(str(period))
            (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
        else:
            (group / "cpu.max").write_text(f"{QUOTA_US} {period}")
    except OSError:
        group.rmdir()
        raise
    return group


def _sweep(root: Path) -> None:
    """Deletes the groups of processes that were killed."""
    for group in root.glob("box-*-*"):
        if not Path(f"/proc/{group.name.split('-')[1]}").exists():
            with suppress(OSError):
                group.rmdir()
