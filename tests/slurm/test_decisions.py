"""Tests of the decisions that scripts/train_gpt_slurm.sh makes after the ranks have ended. Scripts replace srun and
scontrol, so that the tests need no SLURM and each case takes only a moment."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.limits import HANG

ROOT = Path(__file__).parents[2]
STANDINS = {
    "scontrol": """
        case "$*" in
            "show hostnames node[1-3]") printf 'node1\nnode2\nnode3\n' ;;
            "show hostnames node[1,3]") printf 'node1\nnode3\n' ;;
            "show hostnames"*) echo node1 ;;
            "--oneliner show job"*)
                echo "JobId=7 $JOB NodeList=$(cat "$FOLDER/left" 2>/dev/null || echo "$SLURM_JOB_NODELIST")" \
                    "StartTime=2026-01-01T00:00:00 EndTime=2026-01-01T01:00:00"
                ;;
            requeue*) echo "$2" >>"$FOLDER/requeued" ;;
        esac""",
    # This srun saves a checkpoint if SAVES is set, reports how the run ended, and fails as a launcher would. If LEFT is
    # set, the job loses all nodes except those in LEFT, and the next srun reports the outcome THEN.
    "srun": """
        echo "$* under $LAUNCH" >>"$FOLDER/sruns"
        if [[ -e "$FOLDER/left" ]]; then ENDS="$THEN"; fi
        if [[ -n "$LEFT" ]]; then echo "$LEFT" >"$FOLDER/left"; fi
        echo "$SLURM_JOB_START_TIME $SLURM_JOB_END_TIME $SRUN_CPUS_PER_TASK" >"$FOLDER/environment"
        echo "$TORCH_DISABLE_SHARE_RDZV_TCP_STORE" >"$FOLDER/own_store"
        mkdir -p "$FOLDER/save"
        if [[ -n "$SAVES" ]]; then echo "$SAVES" >"$FOLDER/save/latest_checkpointed_iteration.txt"; fi
        if [[ -n "$ENDS" ]]; then
            printf "name=%s\\nwhy=%s\\nsave=%s\\n" "$ENDS" "${WHY:-because}" "$FOLDER/save" >"$OUTCOME_FILE"
            echo "load=${LOADS-$FOLDER/save}" >>"$OUTCOME_FILE"
        fi
        [[ "$ENDS" =~ DONE|RESUMED ]]""",
}


class Batch:
    """Batch job that can be started repeatedly."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts = folder, 0
        for name, body in STANDINS.items():
            (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (folder / name).chmod(0o755)

    def start(
        self, ends: str, saves: str = "", state: str = "RUNNING Reason=None", **environ: str
    ) -> tuple[int, bool, str]:
        """Run the job. Return a tuple: the exit code, True if the job was requeued, and the last message of the job."""
        requeued = self.folder / "requeued"
        requeued.unlink(missing_ok=True)
        environ = {
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "FOLDER": str(self.folder),
            "LOG_DIR": str(self.folder / "logs"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_RESTART_COUNT": str(self.starts),
            "SLURM_CPUS_PER_TASK": "6",
            "JOB": f"JobState={state}",
            "ENDS": ends,
            "SAVES": saves,
        } | environ
        command = ["bash", "scripts/train_gpt_slurm.sh", environ.pop("RUN", "pretrain_gpt.py"), "--flag"]
        done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANG)
        self.starts += 1
        assert not done.stderr.strip(), done.stderr
        return done.returncode, requeued.exists(), done.stdout.splitlines()[-1]


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path)


@pytest.mark.parametrize(
    ("ends", "code", "back"),
    [
        ("DONE", 0, False),
        ("BAD_CONFIGURATION", 2, False),
        ("CALLBACK_FAILED", 3, False),
        ("TO_BE_RESUMED", 75, True),
        ("KILLED", 75, True),
        ("FAILED", 75, True),
        ("RUNNING", 75, True),
        ("", 75, True),
    ],
)
def test_each_exit_decides_whether_the_job_is_requeued(batch: Batch, ends: str, code: int, back: bool) -> None:
    assert batch.start(ends)[:2] == (code, back)


@pytest.mark.parametrize(
    ("why", "loads", "code", "back"),
    [("--exit-duration-in-mins 30.0", None, 75, True), ("--exit-duration-in-mins 30.0", "/elsewhere", 0, False)],
)
def test_a_run_that_reached_its_duration_resumes(
    batch: Batch, why: str, loads: str | None, code: int, back: bool
) -> None:
    environ = {} if loads is None else {"LOADS": loads}
    assert batch.start("DONE", saves="4", WHY=why, **environ)[:2] == (code, back)


def test_a_file_prepares_the_environment_of_the_script_and_of_each_node(batch: Batch) -> None:
    file = batch.folder / "setup.sh"
    file.write_text('[[ -z "$NOT_SET" ]] && false\nexport PYTHON=python-of-a-module NCCL_DEBUG=WARN\n')
    file.write_text(file.read_text() + 'echo "$0" >>"$FOLDER/sourced"\n')
    (batch.folder / "python-of-a-module").write_text('#!/usr/bin/env bash\necho "$NCCL_DEBUG $*" >>"$FOLDER/ranks"\n')
    (batch.folder / "python-of-a-module").chmod(0o755)
    srun = batch.folder / "srun"
    srun.write_text(srun.read_text() + '\nwhile [[ "$1" != bash ]]; do shift; done\n"$@"\n')
    assert batch.start("DONE", SETUP_FILE=str(file))[0] == 0
    assert (batch.folder / "sourced").read_text() == "scripts/train_gpt_slurm.sh\nranks\n"
    assert (batch.folder / "ranks").read_text().startswith("WARN -m torch.distributed.run --nnodes 1 ")
    command = ["bash", "scripts/train_gpt_slurm.sh", "pretrain_gpt.py"]
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n", "SETUP_FILE": "absent.sh"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and "SETUP_FILE=absent.sh: there is no such file in " in done.stderr


def test_crashes_without_a_newer_checkpoint_are_counted(batch: Batch) -> None:
    assert batch.start("FAILED")[1]
    assert batch.start("", MAX_CRASHES="3")[1]
    assert batch.start("FAILED", saves="10")[1], "progress: the count restarts at one"
    assert batch.start("TO_BE_RESUMED")[1], "no crash"
    assert batch.start("RUNNING")[1]
    code, back, said = batch.start("FAILED")
    assert (code, back) == (1, False)
    assert said.endswith("start 6: gives up: 3 crashes and no checkpoint newer than iteration 10 (MAX_CRASHES)")
    assert batch.start("FAILED")[1], "requeued manually: the count starts again"


def test_starts_without_a_newer_checkpoint_are_counted(batch: Batch) -> None:
    assert batch.start("TO_BE_RESUMED", saves="4", MAX_FRUITLESS="2")[1]
    assert batch.start("TO_BE_RESUMED", MAX_FRUITLESS="2")[1]
    code, back, said = batch.start("TO_BE_RESUMED", MAX_FRUITLESS="2")
    assert (code, back) == (1, False)
    assert "gives up: 2 starts and no checkpoint newer than iteration 4 (MAX_FRUITLESS)" in said


def test_a_start_that_was_killed_with_its_script_counts(batch: Batch) -> None:
    (batch.folder / "logs").mkdir()
    (batch.folder / "logs/outcome").write_text(
        f"name=RUNNING\nwhy=\nsave={batch.folder}/save\nload={batch.folder}/save\n"
    )
    assert batch.start("TO_BE_RESUMED", MAX_FRUITLESS="2")[:2] == (1, False)


@pytest.mark.parametrize(
    ("state", "back"),
    [("COMPLETING Reason=None", False), ("COMPLETING Reason=TimeLimit", True), ("PREEMPTED Reason=None", False)],
)
def test_a_cancelled_job_stays_cancelled(batch: Batch, state: str, back: bool) -> None:
    assert batch.start("TO_BE_RESUMED", saves="4", state=state)[1] == back


@pytest.mark.parametrize("loads", ["", "/elsewhere"])
def test_a_job_that_would_start_from_scratch_is_not_requeued(batch: Batch, loads: str) -> None:
    code, back, said = batch.start("TO_BE_RESUMED", saves="4", LOADS=loads)
    assert (code, back) == (1, False) and "--save and --load must name one folder" in said


def test_a_script_runs_under_the_launcher_of_each_node(batch: Batch) -> None:
    batch.start("DONE", RUN="scripts/recipes/llama3.sh", SLURM_GPUS_ON_NODE="8")
    said = (batch.folder / "sruns").read_text()
    command, _, launcher = said.partition(" under ")
    assert command.endswith(" bash scripts/recipes/llama3.sh --flag")
    assert "--nproc-per-node 8 " in launcher and "--rdzv-backend c10d --rdzv-endpoint node1:20007" in launcher


@pytest.mark.parametrize(("restarts", "own"), [({}, "0"), ({"MAX_RESTARTS": "1"}, "1")])
def test_ranks_use_the_store_of_the_launcher_unless_it_restarts_them(
    batch: Batch, restarts: dict[str, str], own: str
) -> None:
    """The launcher keeps the port of its store open. A port that rank 0 has yet to open could be taken by another
    process."""
    batch.start("DONE", **restarts)
    assert (batch.folder / "own_store").read_text() == f"{own}\n"


def test_a_task_of_an_array_requeues_only_itself(batch: Batch) -> None:
    assert batch.start("FAILED", SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="3")[1]
    assert (batch.folder / "requeued").read_text() == "5_3\n"


def test_the_step_receives_variables_that_slurm_does_not_pass_on(batch: Batch) -> None:
    batch.start("DONE")
    times = [int(time.mktime((2026, 1, 1, hour, 0, 0, 0, 0, -1))) for hour in (0, 1)]
    assert (batch.folder / "environment").read_text().split() == [*map(str, times), "6"]


@pytest.mark.parametrize(
    ("then", "code", "back", "said"),
    [
        ("DONE", 0, False, "done: because"),
        ("TO_BE_RESUMED", 75, True, "requeues the job, to resume from iteration 10"),
        ("FAILED", 75, True, "requeues the job, to resume from iteration 10"),
        ("BAD_CONFIGURATION", 75, True, "requeues the job, to resume from iteration 10"),
    ],
)
def test_a_job_that_loses_a_node_continues_with_the_others(
    batch: Batch, then: str, code: int, back: bool, said: str
) -> None:
    lost = {"SLURM_JOB_NODELIST": "node[1-3]", "SLURM_JOB_NUM_NODES": "3", "LEFT": "node[1,3]", "THEN": then}
    *ended, last = batch.start("FAILED", saves="10", **lost)
    assert ended == [code, back] and last.endswith(said)
    first, second = (batch.folder / "sruns").read_text().split("--nodes ")[1:]
    assert first.startswith("3 --nodelist node[1-3] --ntasks 3 ") and "--rdzv-id 7-0-0 " in first
    assert second.startswith("2 --nodelist node[1,3] --ntasks 2 ") and "--rdzv-id 7-0-1 " in second
