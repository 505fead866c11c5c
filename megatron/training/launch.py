"""Which process of the world this is, as the launcher says. No torch."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Each of these asks a run to save and to end."""


@dataclass(frozen=True)
class Launch:
    """Place of a process in its world and on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK) first, then those of a SLURM step with one task
        a rank, else a single process. Raises ValueError if a variable is set and makes no sense."""
        environ = os.environ if environ is None else environ
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return cls._read(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "torchrun")
        if int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
            return cls._read(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "srun")
        return cls()

    @classmethod
    def _read(cls, environ: Mapping[str, str], rank: str, size: str, local: str, launcher: str) -> Launch:
        launch = cls(int(environ[rank]), int(environ[size]), int(environ.get(local, "0")), launcher)
        if not 0 <= launch.rank < launch.world_size:
            raise ValueError(f"{rank}={launch.rank} must be below {size}={launch.world_size}")
        return launch

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Sets what torch.distributed's env:// rendezvous reads, where the launcher was not torchrun.

        Under srun the first node of the list is the meeting point; set MASTER_ADDR to choose another one.
        """
        if self.launcher == "srun":
            environ["RANK"], environ["WORLD_SIZE"] = str(self.rank), str(self.world_size)
            environ["LOCAL_RANK"] = str(self.local_rank)
            environ.setdefault("MASTER_ADDR", first_host(environ.get("SLURM_STEP_NODELIST", "localhost")))
            # Jobs that share a node meet at different ports: derived from the job and step numbers.
            job = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
            environ.setdefault("MASTER_PORT", str(20000 + job % 20000))


def hold_ignored_signals() -> None:
    """Keeps signals that the launcher has this process ignore until `Watch.start`, which has a use for them.

    A script that starts the ranks ignores the signals meant for them, and what starts ignored stays so: without this,
    one that comes before the watch would be lost.
    """
    held = {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: `gpu[003-006,9],login` -> `gpu003`."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return nodelist.partition(",")[0]
    first = rest.split("]")[0].replace(",", "-").split("-")[0]
    return head + first
