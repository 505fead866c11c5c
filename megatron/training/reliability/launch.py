"""Which process of the world this is, as the launcher says. No torch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""Each of these asks a run to save and to end."""


def choose_allocators(environ: MutableMapping[str, str]) -> None:
    """Has torch take large blocks in huge pages on CPU, where Linux has them: every fresh block costs a page fault for
    each 2 MiB, not for each 4 KiB, which is up to a third of a training step. On GPUs, has its pool grow in place, so
    that it does not fall to pieces. What the user has set stands. To be called before torch makes a tensor."""
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@dataclass(frozen=True)
class Launch:
    """Place of a process in its world and on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"

    def name(self, host: str, rank: int | None = None) -> str:
        """How messages name a rank, by default this one: `rank 3 of 8 on HOST`."""
        return f"rank {self.rank if rank is None else rank} of {self.world_size} on {host}"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK) first, then those of a SLURM step with one task
        a rank, else a single process. Raises ValueError if a variable is set and makes no sense."""
        environ = os.environ if environ is None else environ
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return cls._read(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "torchrun")
        if _integer(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
            return cls._read(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "srun")
        return cls()

    @classmethod
    def _read(cls, environ: Mapping[str, str], rank: str, size: str, local: str, launcher: str) -> Launch:
        launch = cls(_integer(environ, rank), _integer(environ, size), _integer(environ, local, "0"), launcher)
        if not 0 <= launch.rank < launch.world_size:
            raise ValueError(
                f"{rank}={launch.rank} must be from 0 to below {size}={launch.world_size}; the launcher sets both"
            )
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
    """Holds back signals that the launcher has this process ignore, until `SignalListener.start`.

    A script that starts the ranks ignores the signals meant for them, and its children inherit that. Without this, a
    signal that comes before the watchdog would be lost.
    """
    held = {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)


def write_error_file(text: str, later: int = 0) -> bool:
    """Tells torchrun what this process died of, which it prints last; False if there is no torchrun.

    It takes the earliest failure for the cause, and counts in whole seconds: `later` is added to this one's.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + later)}
    try:
        Path(path).write_text(json.dumps({"message": {"message": text.splitlines()[0], "extraInfo": extra}}))
    except OSError:  # a full disk, of which the text may tell
        return False
    return True


def tell_last(text: str, now: bool = False) -> None:
    """Says the cause of the end on the screen, as the last thing: torchrun prints what is in a worker's error file
    when all workers have ended, but not if it starts them again. `now`: not if it is itself told to end, either."""
    written = write_error_file(text, -10)
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    if not written or restarts or now:
        print(text, file=sys.stderr, flush=True)


def _integer(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = environ.get(name, default)
    try:
        return int(value or "")
    except ValueError:
        raise ValueError(
            f"{name}={value}: must be a whole number; the launcher (torchrun or srun) sets it, or unset it to run alone"
        ) from None


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list: `gpu[003-006,9],login` -> `gpu003`."""
    head, bracket, rest = nodelist.partition("[")
    if not bracket or "," in head:
        return nodelist.partition(",")[0]
    first = rest.split("]")[0].replace(",", "-").split("-")[0]
    return head + first
