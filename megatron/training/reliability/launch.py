"""Read rank and world size from the launcher's environment (torchrun or srun), and send messages to the launcher.

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
"""Signals on which the run saves a checkpoint and exits. If SIGHUP is already ignored when the process starts, as under
nohup, the process keeps ignoring it."""

RANGES = re.compile(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]")
NODE = re.compile(r"((?:[^][\s,]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+)(?:[\s,]|$)")
"""Regular expressions for the parts of a SLURM node list. `RANGES` matches a range in brackets, and `NODE` matches a
comma-separated part."""

START = "START_IN_JOB"
"""Environment variable that counts the starts of a rank from 0. The variable is set only if a starter
(`megatron.training.reliability.starts`) runs the rank in a child process and may restart it."""

BEGAN = "JOB_BEGAN"
"""Environment variable with the `time.monotonic()` value at which the rank was started for the first time."""

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Environment variables that mpirun sets to the number of launched processes."""


def choose_allocators(environ: MutableMapping[str, str]) -> None:
    """Enable huge pages on the CPU and expandable segments on GPUs. A variable that the user has already set is kept.
    Call this function before torch allocates a tensor.

    With huge pages, a new block causes one page fault per 2 MiB instead of per 4 KiB, which saves up to a third of a
    training step. Expandable segments avoid fragmentation.
    """
    environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def quiet_torch(environ: MutableMapping[str, str]) -> None:
    """Suppress warnings from torch's C++ code, unless the user has set the log level. Call this function before torch
    is imported.

    Without this setting, each attempt to reach a store or rank that is gone would print a warning with dozens of C++
    frames before the failure report. Errors from C++ are still printed.
    """
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def skip_final_collection() -> None:
    """Make this process exit without Python's final garbage collections.

    The final collections take seconds, because they traverse all objects that torch created when it was imported. Files
    are still closed, and `atexit` functions still run."""
    atexit.register(gc.freeze)


@dataclass(frozen=True)
class Launch:
    """Rank of a process in the world and on its node, and the launcher that started the process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    launcher: str = "none"
    several_hosts: bool = False
    """True if the launcher has started ranks on several hosts or simulates several hosts."""

    def name(self, host: str, rank: int | None = None) -> str:
        """Return a rank's name for messages, such as `rank 3 of 8 on HOST`. The default is the name of this rank."""
        return f"rank {self.rank if rank is None else rank} of {self.world_size} on {host}"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Launch:
        """Read torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK), or else the variables of a SLURM step with one task
        per rank. If neither set of variables is present, return the launch of a single process.

        Raises ValueError if a variable has an invalid value. Also raises ValueError if only some of a launcher's
        variables are set. Without this check, each process would start a separate run."""
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
                f"{given} without {missing}: a launched process needs both RANK and WORLD_SIZE; start the ranks with "
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
        # torchrun --master-port 0 sets MASTER_PORT to 0
        if launch.world_size > 1 and environ.get("MASTER_PORT") == "0":
            raise ValueError(
                "MASTER_PORT=0 must be above 0, because all ranks meet at it; give torchrun --standalone or a port"
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

        Under srun, ranks rendezvous at the first node of the node list. Set MASTER_ADDR to select a different node.
        """
        if self.launcher == "srun":
            environ["RANK"], environ["WORLD_SIZE"] = str(self.rank), str(self.world_size)
            environ["LOCAL_RANK"] = str(self.local_rank)
            if "MASTER_ADDR" not in environ:
                environ["MASTER_ADDR"] = first_host(environ.get("SLURM_STEP_NODELIST", "localhost"))
            # The port depends on the job and step numbers, so that jobs that share a node use different ports.
            job = int(environ.get("SLURM_JOB_ID", "0")) * 31 + int(environ.get("SLURM_STEP_ID", "0"))
            environ.setdefault("MASTER_PORT", str(20000 + job % 20000))


def hold_ignored_signals() -> None:
    """Block the signals that this process has inherited as ignored from its launcher. The signals stay blocked until
    `SignalListener.start`, so that signals which arrive earlier are kept.

    A script that launches ranks may itself ignore signals that are meant for the ranks. The ranks inherit this setting,
    and would lose signals that arrive before the watchdog starts.
    """
    held = {number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN} - {signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, held)


def write_error_file(text: str, at: float | None = None) -> bool:
    """Write torchrun's error file. After the workers end, torchrun prints the text of this file. Return False if the
    launcher is not torchrun.

    torchrun considers the failure with the earliest time, in whole seconds, to be the root cause. `at` is the time of
    the failure to report. The default is the current time."""
    path, text = os.environ.get("TORCHELASTIC_ERROR_FILE"), redacted(text)
    if not path:
        return False
    extra = {"py_callstack": text, "timestamp": str(int(at or time.time()))}
    try:
        Path(path).write_text(json.dumps({"message": {"message": text.splitlines()[0], "extraInfo": extra}}))
    except OSError:  # the disk may be full
        return False
    return True


def tell_last(text: str, now: bool = False, at: float | None = None) -> None:
    """Print the root cause so that it is the last text on the screen. `at` is the time of the failure. The default is
    the current time.

    torchrun prints a worker's error file when all workers have ended. If torchrun will restart the workers, or if
    torchrun is ending too (`now` is True), this function prints the text itself.

    The time in the error file is one second before the failure, so that torchrun reports this failure as the root
    cause. For a process that died without an error file, torchrun uses the second in which torchrun noticed that the
    process had ended."""
    text = visible(text)
    written = write_error_file(text, (at or time.time()) - 1)
    if not written or restarts_left() or now:
        print(text, file=sys.stderr, flush=True)


def restarts_left() -> bool:
    """Return True if torchrun or the parent processes will restart the ranks. torchrun prints no error files before a
    restart."""
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
    """Return the first host in a SLURM node list, as `scontrol show hostnames` prints it: `gpu003` for
    `gpu[003-006,9],login`, and `r1n3` for `r[1-2]n[3-4]`. Raises ValueError if the text is not a node list."""
    first = NODE.match(nodelist.strip(", "))
    if first is None:
        raise ValueError(
            f"SLURM_STEP_NODELIST={nodelist}: must be a list of hosts such as node[1-4,7],login; SLURM sets it, or set "
            "MASTER_ADDR to the host of rank 0"
        )
    return RANGES.sub(lambda ranges: ranges[1], first[1])
