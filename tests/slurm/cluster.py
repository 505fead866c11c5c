"""Jobs on a one-node SLURM cluster, which `start_slurm.sh` starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.limits import HANG

ROOT = Path(__file__).parents[2]
MISSING = [
    name
    for name in ("munged", "slurmctld", "slurmd", "sbatch")
    if not shutil.which(name, path=os.environ["PATH"] + ":/usr/sbin")
]
MODEL = (
    "tests/faults/broken_pretrain.py --cpu --tp 2 --num-layers 2 --hidden-size 32 --num-attention-heads 4 "
    "--seq-length 16 --vocab-size 64 --mock-data --make-vocab-size-divisible-by 8 --lr 1e-3 --hidden-dropout 0.1 "
    "--global-batch-size 8 --train-iters 8 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()
PAUSE = "await_request:0:4"
"""Fault that makes step 4 wait for a stop request, so that the request always arrives in the middle of the run."""

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Job:
    """SLURM job on the test cluster, and the folder of the job."""

    id: str
    folder: Path

    @property
    def save(self) -> Path:
        return self.folder / "save"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def fields(self) -> dict[str, str]:
        """Return SLURM's record of the job."""
        words = command("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def paused(self) -> None:
        """Wait until the job has reached the step in which it pauses until a stop request arrives."""
        wait_until(lambda: (self.folder / "fault").exists(), self)

    def limit(self, minutes: int = 0) -> None:
        """Set the job's time limit with the rights of the superuser. The default limit expires within 100 seconds.
        SLURM checks limits every half minute. The default leaves enough time for SLURM to send the signal before the
        limit expires."""
        hours, ran, seconds = map(int, self.fields()["RunTime"].split(":"))
        soon = (3600 * hours + 60 * ran + seconds + 40) // 60 + 1
        command("scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes or soon}")

    def requeued(self) -> None:
        """Wait until the job has been requeued at least once."""
        wait_until(lambda: self.fields()["Restarts"] != "0", self)

    def ended(self) -> dict[str, str]:
        """Wait until the job has left the queue, and return the fields of its record."""
        wait_until(lambda: self.fields()["JobState"] in ENDED, self)
        return self.fields()

    @property
    def all_logs(self) -> str:
        """Return the logs of the script and of all ranks, for messages of failed assertions."""
        logs = [path for path in (self.folder / "log", *self.folder.glob("logs/node-*.log")) if path.exists()]
        return "\n".join(f"{path}:\n{path.read_text()}" for path in logs)


def wait_until(condition: Callable[[], bool], job: Job, seconds: float = HANG) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, f"{job.fields()}\n{job.all_logs}"
        time.sleep(0.2)


def command(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=HANG).stdout.strip()


class Cluster:
    """One-node SLURM cluster to which the tests submit jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(
        self, name: str, *flags: str, fault: str = PAUSE, once: bool = True, options: str = "", **environ: str
    ) -> Job:
        """Submit scripts/train_gpt_slurm.sh for two processes with MODEL and additional flags."""
        folder = self.folder / name
        folder.mkdir()
        environ |= {"FAULT": fault, "FAULT_FILE": str(folder / "fault"), "LOG_DIR": str(folder / "logs")}
        environ |= {"FAULT_ONCE": "1"} if once else {}
        # The job must not inherit environment variables that a launcher or an outer SLURM job set for this process.
        outer = {
            key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "TORCHEL"))
        }
        environ |= {"SLURM_CONF": os.environ["SLURM_CONF"]}
        environ |= {"PYTHON": sys.executable, "GPUS_PER_NODE": "2", "OMP_NUM_THREADS": "1", "REPO": str(ROOT)}
        words = ["sbatch", "--parsable", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2", "--oversubscribe"]
        words += ["--time=20", f"--output={folder}/log", f"--job-name={name}", *options.split()]
        words += ["scripts/train_gpt_slurm.sh", *MODEL, f"--save={folder}/save", f"--load={folder}/save", *flags]
        done = subprocess.run(
            words, cwd=ROOT, env=outer | environ, check=True, capture_output=True, text=True, timeout=HANG
        )
        return Job(done.stdout.strip(), folder)


@contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a SLURM cluster in a temporary folder. All SLURM commands of this process connect to this cluster."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # socket paths must be short
    script, before = str(ROOT / "tests/slurm/start_slurm.sh"), os.environ.get("SLURM_CONF")
    try:
        subprocess.run(["bash", script, "start", f"{folder}/run"], check=True, timeout=HANG)
        os.environ["SLURM_CONF"] = f"{folder}/run/slurm.conf"
        yield Cluster(folder)
    finally:
        subprocess.run(["bash", script, "stop", f"{folder}/run"], check=True, timeout=HANG)
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder)
