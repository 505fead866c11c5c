"""Tests of jobs on a real one-node SLURM cluster. Jobs that are ended by signals and limits are requeued, and their
results are bit-identical to those of an undisturbed job. Jobs that cannot succeed are not requeued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.slurm.cluster import MISSING, MODEL, Cluster, Job, command, running_cluster
from tools.inspect_checkpoint import differences, open_or_complain

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"SLURM is not installed: no {', '.join(MISSING)}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def jobs(cluster: Cluster) -> dict[str, Job]:
    """Submit all jobs at once. The jobs can run at the same time, because they mostly wait for SLURM."""
    return {
        "limit": cluster.submit("limit", "--exit-margin-in-mins=0.01", options="--signal=USR1@1"),
        "signal": cluster.submit("signal"),
        "duration": cluster.submit("duration", "--exit-duration-in-mins=1"),
        "crashes": cluster.submit("crashes", fault="exception:1:3", once=False, MAX_CRASHES="2"),
        "wrong": cluster.submit("wrong", "--num-layers=0"),
    }


@pytest.fixture(scope="module")
def undisturbed(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train without SLURM while the jobs wait, and return the folder of checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    run_forked(2, [*MODEL[1:], "--save", str(folder / "save")], folder / "screen")
    return folder / "save"


def assert_same_end(job: Job, undisturbed: Path) -> None:
    one, other = (open_or_complain(save) for save in (undisturbed, job.save))
    assert other.payload["iteration"] == 8
    assert not differences(one, other)


def test_a_signal_saves_and_requeues_the_job(jobs: dict[str, Job], undisturbed: Path) -> None:
    job = jobs["signal"]
    job.paused()
    command("scancel", "--signal=USR1", job.id)
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", "1"), job.all_logs
    assert "start 1: ended to be resumed: SIGUSR1 on rank " in job.log
    assert "start 1: requeues the job, to resume from iteration 4" in job.log
    assert job.log.rstrip().endswith("start 2: done")
    assert_same_end(job, undisturbed)


def test_the_time_limit_saves_and_requeues_the_job(jobs: dict[str, Job], undisturbed: Path) -> None:
    """SLURM sends its signal some time before the time limit. The test sets the limit when the run has reached its
    paused step."""
    job = jobs["limit"]
    job.paused()
    job.limit()
    job.requeued()
    job.limit(20)
    fields = job.ended()
    assert fields["JobState"] == "COMPLETED" and int(fields["Restarts"]) >= 1, job.all_logs
    assert "requeues the job, to resume from iteration 4" in job.log and "SIGUSR1" in job.log
    assert_same_end(job, undisturbed)


def test_a_run_stopped_by_its_duration_is_requeued(jobs: dict[str, Job], undisturbed: Path) -> None:
    """Megatron-LM's scripts use --exit-duration-in-mins to stay below the limit of a queue. The duration must be long
    enough for a start and several steps on a slow machine: a start that ends before its first step changes nothing."""
    job = jobs["duration"]
    fields = job.ended()
    assert fields["JobState"] == "COMPLETED" and int(fields["Restarts"]) >= 1, job.all_logs
    assert "start 1: ended to be resumed: --exit-duration-in-mins 1.0" in job.log
    assert job.log.rstrip().endswith(f"start {int(fields['Restarts']) + 1}: done")
    assert_same_end(job, undisturbed)


def test_a_crash_loop_ends(jobs: dict[str, Job]) -> None:
    job = jobs["crashes"]
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("FAILED", "1"), job.all_logs
    assert job.log.count("crashed: rank 1 of 2 on ") == 2 and "injected: this rank's own error" in job.log
    assert "start 2: gives up: 2 crashes and no checkpoint newer than iteration 0 (MAX_CRASHES)" in job.log


def test_a_job_with_a_wrong_configuration_is_not_requeued(jobs: dict[str, Job]) -> None:
    job = jobs["wrong"]
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"], fields["ExitCode"]) == ("FAILED", "0", "2:0"), job.all_logs
    assert "start 1: the configuration cannot run" in job.log
    assert "--num-layers 0" in (job.folder / "logs/node-0.log").read_text()


@pytest.fixture(scope="module")
def more_jobs(cluster: Cluster, jobs: dict[str, Job], pytestconfig: pytest.Config) -> dict[str, Job]:
    """Submit jobs that take minutes."""
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
    assert (fields["JobState"], fields["Restarts"]) == ("CANCELLED", "0"), job.all_logs
    assert "not requeued: the job is COMPLETING/None" in job.log


def test_a_signal_to_the_batch_script_reaches_the_ranks(more_jobs: dict[str, Job], undisturbed: Path) -> None:
    job = more_jobs["batch"]
    job.paused()
    command("scancel", "--batch", "--signal=USR2", job.id)
    assert (job.ended()["JobState"], job.fields()["Restarts"]) == ("COMPLETED", "1"), job.all_logs
    assert "start 1: got a signal, passes it on to the ranks" in job.log
    assert_same_end(job, undisturbed)


@pytest.mark.parametrize(
    ("name", "said", "restarts"),
    [
        ("margin", "ended to be resumed: the SLURM job ends in 0.4 minutes", 1),
        ("hangs", "DUE TO TIME LIMIT", 1),
        ("dies", "start 1: crashed: rank 1 of 2 on ", 1),
        ("restarts", "start 1: done", 0),
    ],
)
def test_other_exits_of_a_start(
    more_jobs: dict[str, Job], undisturbed: Path, name: str, said: str, restarts: int
) -> None:
    job = more_jobs[name]
    fields = job.ended()
    assert (fields["JobState"], fields["Restarts"]) == ("COMPLETED", str(restarts)), job.all_logs
    assert said in job.log
    assert_same_end(job, undisturbed)
