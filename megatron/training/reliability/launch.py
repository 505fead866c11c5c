"""Rank and world size from the launcher's environment (torchrun or srun), and messages to the launcher.

This module does not import torch.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megatron.training.reliability.url_credentials import redacted
from megatron.training.reliability.visible_text import visible

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""Each of these requests the run to save and exit. A SIGHUP that the process ignores when it starts, as under nohup,
stays ignored."""

RANGES = re.compile(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]")
NODE = re.compile(r"((?:[^][\s,]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:[\s,]|$)")
"""The ranges in a node list of SLURM, and a part of such a list between commas."""

START = "START_IN_JOB"
"""Environment variable with the number of this start, from 0, if a launcher process restarts its rank itself."""

BEGAN = "JOB_BEGAN"
"""Variable with `time.monotonic()` when the first of these starts began."""

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables of mpirun with the number of processes that it has started."""


def choose_allocators(environ: MutableMapping[str, str]) -> None:
    """Enable huge pages on CPU and expandable segments on GPUs, unless the user has set either. Call it before torch
    allocates a tensor.

    With huge pages a new block costs a page fault per 2 MiB instead of 4 KiB, which saves up to a third of a training
    step. Expandable segments avoid fragmentation.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def quiet_torch(environ: MutableMapping[str, str]) -> None:
    """Keep warnings of torch's C++ code off the screen, unless the user has set their level. Call it before torch is
    imported.

    When a store or a rank is gone, each attempt to reach it would print dozens of C++ frames ahead of the report.
    Errors are still printed.
    """
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def skip_final_collection() -> None:
    """Has this process end without the garbage collections of a Python interpreter that ends.

    They look through everything that torch has imported, which takes seconds after all work is done. Files are still
    closed, and functions of `atexit` still run."""
    atexit.register(gc.freeze)


@dataclass(frozen=True)
class Launch:
    """Rank of a process in the world and on its node, and the launcher that started it."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"
    several_hosts: bool = False
    """True if the launcher has started ranks on more than one host, or as if there were."""

    def name(self, host: str, rank: int | None = None) -> str:
        """Name of a rank in messages, by default of this one: `rank 3 of 8 on HOST`."""
        return f"rank {self.rank if rank is None else rank} of {self.world_size} on {host}"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), else those of a SLURM step with one task per
        rank, else returns a single process. Raises ValueError if a variable has an invalid value, or if a launcher has
        set some of its variables only: each of its processes would be a run of its own."""
        environ = os.environ if environ is None else environ
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return cls._read(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "torchrun")
        if _integer(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
            return cls._read(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "srun")
        half = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in environ]
        half += [name for name in MPI_SIZES if _integer(environ, name, "1") > 1]
        if half:
            given = " ".join(f"{name}={environ[name]}" for name in half)
            missing = " and ".join(name for name in ("RANK", "WORLD_SIZE") if name not in environ)
            raise ValueError(
                f"{given} without {missing}: a process of a launch has both RANK and WORLD_SIZE; start the ranks with "
                f"torchrun or srun, which set them, or unset {' '.join(half)} to run alone"
            )
        return cls()

    @classmethod
    def _read(cls, environ: Mapping[str, str], rank: str, size: str, local: str, launcher: str) -> Launch:
        world_size = _integer(environ, size)
        several = _integer(environ, "LOCAL_WORLD_SIZE", str(world_size)) < world_size
        if launcher == "srun":
            several = _integer(environ, "SLURM_STEP_NUM_NODES", "1") > 1
        launch = cls(_integer(environ, rank), world_size, _integer(environ, local, "0"), launcher, several)
        if not 0 <= launch.rank < launch.world_size:
            raise ValueError(
                f"{rank}={launch.rank} must be from 0 to below {size}={launch.world_size}; the launcher sets both"
            )
        # torchrun --master-port 0 passes it on unchanged
        if launch.world_size > 1 and environ.get("MASTER_PORT") == "0":
            raise ValueError(
                "MASTER_PORT=0 must be a port above 0, at which all ranks meet; give torchrun --standalone, or a port"
            )
        absent = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
        if launcher == "torchrun" and launch.world_size > 1 and absent:
            raise ValueError(
                f"{rank}={launch.rank} {size}={world_size} without {' and '.join(absent)}, at which all ranks meet; "
                f"start the ranks with torchrun, which sets them, or unset {rank} and {size} to run alone"
            )
        return launch

    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set the variables that torch.distributed's env:// rendezvous reads, if the launcher was not torchrun.

        Under srun, ranks meet at the first node of the list; set MASTER_ADDR to choose another one.
        """
        if self.launcher == "srun":
            environ["RANK"], environ["WORLD_SIZE"] = str(self.rank), str(self.world_size)
            environ["LOCAL_RANK"] = str(self.local_rank)
            if "MASTER_ADDR" not in environ:
                environ["MASTER_ADDR"] = first_host(environ.get("SLURM_STEP_NODELIST", "localhost"))
            # Jobs that share a node use different ports, derived from the job and step numbers.
            job = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
            environ.setdefault("MASTER_PORT", str(20000 + job % 20000))


def hold_ignored_signals() -> None:
    """Hold back signals that the launcher has this process ignore, until `SignalListener.start`.

    A script that starts the ranks ignores the signals meant for them, and its children inherit that. Without this, a
    signal that comes before the watchdog would be lost.
    """
    held = {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN} - {signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)


def write_error_file(text: str, at: float | None = None) -> bool:
    """Write torchrun's error file, whose text torchrun prints last. Returns False without torchrun.

    torchrun takes the earliest failure as the root cause, in whole seconds: this one is `at`, by default now."""
    path, text = os.environ.get("TORCHELASTIC_ERROR_FILE"), redacted(text)
    if not path:
        return False
    extra = {"py_callstack": text, "timestamp": str(int(at or time.time()))}
    try:
        Path(path).write_text(json.dumps({"message": {"message": text.splitlines()[0], "extraInfo": extra}}))
    except OSError:  # a full disk, which the text may mention
        return False
    return True


def tell_last(text: str, now: bool = False, at: float | None = None) -> None:
    """Make the root cause, of the time `at` or of now, the last text on the screen.

    torchrun prints a worker's error file when all workers have ended. If torchrun will restart them, or with `now`,
    because torchrun itself is ending, the text is printed directly.

    torchrun shows a time one to two seconds before: a process that died without an error file has the second in which
    torchrun noticed it, and this cause must be earlier."""
    text = visible(text)
    written = write_error_file(text, (at or time.time()) - 1)
    if not written or restarts_left() or now:
        print(text, file=sys.stderr, flush=True)


def restarts_left() -> bool:
    """Return whether ranks are started again, by torchrun, which then prints no error files, or by their parents."""
    by_torchrun = os.environ.get("TORCHELASTIC_RESTART_COUNT") != os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    return by_torchrun or START in os.environ


def _integer(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = environ.get(name, default)
    try:
        return int(value or "")
    except ValueError:
        raise ValueError(
            f"{name}={value}: must be a whole number; the launcher (torchrun or srun) sets it, or unset it to run alone"
        ) from None


def first_host(nodelist: str) -> str:
    """First host of a SLURM node list, as `scontrol show hostnames` prints it: `gpu[003-006,9],login` -> `gpu003`,
    `r[1-2]n[3-4]` -> `r1n3`. Raises ValueError if it is no node list."""
    first = NODE.match(nodelist.strip(", "))
    if first is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodelist}: must be a list of hosts such as node[1-4,7],login; SLURM sets it, or set "
            "MASTER_ADDR to the host of rank 0"
        )
    return RANGES.sub(lambda ranges: ranges[1], first[1])
