"""Jobs of a real SLURM, of one node: ended by signals and limits they come back by themselves and end bit for bit like
the undisturbed one; what cannot succeed does not come back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.inspect_checkpoint import first_difference, open_or_complain

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
"""Step 4 waits for the end to be asked for, so that it always comes in the middle of the run."""

NEVER = "await_request:0:0"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: no {', '.join(MISSING)}")


@dataclass(frozen=True)
class Job:
    """A job of the test's SLURM, and its folder."""

    id: str
    folder: Path

    @property
    def save(self) -> Path:
        return self.folder / "save"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def fields(self) -> dict[str, str]:
        """What SLURM knows of it."""
        words = command("scontrol", "--oneliner", "show", "job", self.id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def paused(self) -> None:
        """Waits until it is in the step that waits."""
        wait_until(lambda: (self.folder / "fault").exists(), self)

    def ended(self) -> dict[str, str]:
        """Waits until it has left the queue, and returns its fields."""
        wait_until(lambda: self.fields()["JobState"] in ENDED, self)
        return self.fields()


def wait_until(condition: object, job: Job, seconds: float = 250.0) -> None:
    assert callable(condition)
    limit = time.monotonic() + seconds
    while not condition():
        logs = [path for path in (job.folder / "log", *job.folder.glob("logs/node-*.log")) if path.exists()]
        assert time.monotonic() < limit, "\n".join([str(job.fields()), *(path.read_text() for path in logs)])
        time.sleep(0.2)


def command(*words: str) -> str:
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


class Cluster:
    """The test's SLURM."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def submit(
        self, name: str, *flags: str, fault: str = PAUSE, once: bool = True, options: str = "", **environ: str
    ) -> Job:
        """Submits scripts/train_gpt_slurm.sh for two processes with MODEL and further flags."""
        folder = self.folder / name
        folder.mkdir()
        environ |= {"FAULT": fault, "FAULT_FILE": str(folder / "fault"), "LOG_DIR": str(folder / "logs")}
        environ |= {"FAULT_ONCE": "1"} if once else {}
        environ |= {"PYTHON": sys.executable, "GPUS_PER_NODE": "2", "OMP_NUM_THREADS": "1", "REPO": str(ROOT)}
        words = ["sbatch", "--parsable", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2", "--oversubscribe"]
        words += ["--time=20", f"--output={folder}/log", f"--job-name={name}", *options.split()]
        words += ["scripts/train_gpt_slurm.sh", *MODEL, f"--save={folder}/save", f"--load={folder}/save", *flags]
        done = subprocess.run(
            words, cwd=ROOT, env=os.environ | environ, check=True, capture_output=True, text=True, timeout=60
        )
        return Job(done.stdout.strip(), folder)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short, as the path of a socket has to be
    script = str(ROOT / "tests/slurm/start_slurm.sh")
    before = os.environ.get("SLURM_CONF")
    try:
        subprocess.run(["bash", script, "start", f"{folder}/run"], check=True, timeout=60)
        os.environ["SLURM_CONF"] = f"{folder}/run/slurm.conf"
        yield Cluster(folder)
    finally:
        subprocess.run(["bash", script, "stop", f"{folder}/run"], check=True, timeout=120)
        os.environ.pop("SLURM_CONF")
        if before is not None:
            os.environ["SLURM_CONF"] = before
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, Job]:
    """All jobs, submitted at once as they wait for SLURM most of the time."""
    return {
        "limit": cluster.submit("limit", "--exit-margin-in-mins=0.01", options="--time=1 --signal=USR1@1"),
        "signal": cluster.submit("signal"),
        "undisturbed": cluster.submit("undisturbed", fault=NEVER),
        "crashes": cluster.submit("crashes", fault="exception:1:3", once=False, MAX_CRASHES="2"),
        "wrong": cluster.submit("wrong", "--num-layers=0"),
    }


def assert_same_end(job: Job, undisturbed: Job) -> None:
    assert undisturbed.ended()["JobState"] == "COMPLETED", undisturbed.log
    one, other = (open_or_complain(each.save) for each in (undisturbed, job))
    assert other.payload["iteration"] == 8
    assert first_difference(one, other) is None


def test_a_signal_saves_and_the_job_goes_on_by_itself(jobs: dict[str, Job]) -> None:
    job = jobs["signal"]
    job.paused()
    command("scancel", "--signal=USR1", job.id)
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), job.log
    assert "start 1: ended to be resumed: SIGUSR1 on rank " in job.log
    assert "start 1: back to the queue, to go on from iteration 4" in job.log
    assert job.log.rstrip().endswith("start 2: done")
    assert_same_end(job, jobs["undisturbed"])


def test_the_time_limit_saves_and_the_job_goes_on_by_itself(jobs: dict[str, Job]) -> None:
    """SLURM's own signal, some time before the minute is over."""
    job = jobs["limit"]
    fields = job.ended()
    assert fields["JobState"] == "COMPLETED" and int(fields["Restarts"]) >= 1, job.log
    assert "back to the queue, to go on from iteration 4" in job.log and "SIGUSR1" in job.log
    assert_same_end(job, jobs["undisturbed"])


def test_a_crash_loop_ends(jobs: dict[str, Job]) -> None:
    job = jobs["crashes"]
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "1"), job.log
    assert job.log.count("crashed: rank 1 of 2 on ") == 2 and "injected: this rank's own error" in job.log
    assert "start 2: gives up: 2 crashes and no checkpoint newer than iteration 0 (MAX_CRASHES)" in job.log


def test_a_wrong_configuration_does_not_come_back(jobs: dict[str, Job]) -> None:
    job = jobs["wrong"]
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"], fields["ExitCode"]) == ("FAILED", "0", "2:0"), job.log
    assert "start 1: the configuration cannot run" in job.log
    assert "--num-layers 0" in (job.folder / "logs/node-0.log").read_text()


@pytest.fixture(scope="module")
def more_jobs(cluster: Cluster, jobs: dict[str, Job], pytestconfig: pytest.Config) -> dict[str, Job]:
    """Jobs that take minutes."""
    if not pytestconfig.getoption("--whole"):
        pytest.skip("takes minutes: runs under --whole")
    minute, saves = "--time=1 --signal=CONT@1", "--save-interval=2"
    return {
        "margin": cluster.submit("margin", "--exit-margin-in-mins=0.4", options=minute),
        "hangs": cluster.submit("hangs", saves, "--exit-margin-in-mins=0.01", fault="slow:1:5", options=minute),
        "dies": cluster.submit("dies", saves, fault="kill:1:6"),
        "restarts": cluster.submit("restarts", saves, fault="kill:1:6", MAX_RESTARTS="1"),
        "cancelled": cluster.submit("cancelled"),
        "batch": cluster.submit("batch", options="--signal=B:USR2@1"),
    }


def test_a_cancelled_job_stays_cancelled(more_jobs: dict[str, Job]) -> None:
    job = more_jobs["cancelled"]
    job.paused()
    command("scancel", job.id)
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0"), job.log
    assert "not put back into the queue: the job is COMPLETING/None" in job.log


def test_a_signal_to_the_batch_script_reaches_the_ranks(more_jobs: dict[str, Job], jobs: dict[str, Job]) -> None:
    job = more_jobs["batch"]
    job.paused()
    command("scancel", "--batch", "--signal=USR2", job.id)
    assert (job.ended()["JobState"], job.fields()["Restarts"]) == ("COMPLETED", "1"), job.log
    assert "start 1: got a signal, passes it on to the ranks" in job.log
    assert_same_end(job, jobs["undisturbed"])


@pytest.mark.parametrize(
    ("name", "said", "restarts"),
    [
        ("margin", "ended to be resumed: the SLURM job ends in 0.4 minutes", 1),
        ("hangs", "DUE TO TIME LIMIT", 1),
        ("dies", "start 1: crashed: rank 1 of 2 on ", 1),
        ("restarts", "start 1: done", 0),
    ],
)
def test_other_ends_of_a_start(
    more_jobs: dict[str, Job], jobs: dict[str, Job], name: str, said: str, restarts: int
) -> None:
    job = more_jobs[name]
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", str(restarts)), job.log
    assert said in job.log
    assert_same_end(job, jobs["undisturbed"])
