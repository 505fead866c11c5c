"""User errors that can only be detected at startup are printed once, without a traceback, and with exit code 2."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.training import initialize
from megatron.training.config.output_files import unwritable, why_unwritable
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch
from tests.corpus import write_documents
from tests.faults.runs import MODEL
from tests.forked import run_forked

FLAGS = [flag for flag in MODEL if flag != "--mock-data"] + ["--pp", "1", "--train-iters", "2"]


NO_FILES = {
    "metrics.jsonl": "folder",
    "run_config.yaml": "folder",
    "run_events.jsonl": "special file",
    "latest_checkpointed_iteration.txt": "link to itself",
    ".lease": "special file",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create two data sets: a valid one, and one with token ids beyond the vocabulary."""
    folder = tmp_path_factory.mktemp("data")
    for name, token in (("ok", 7), ("big", 60000)):
        write_documents(folder / name, [np.full(40, token)] * 20)
    (folder / "file").write_text("")
    (folder / "folders").mkdir()
    for name, kind in NO_FILES.items():
        path = folder / "folders" / name
        if kind == "folder":
            path.mkdir()
        elif kind == "special file":
            os.mkfifo(path)
        else:
            path.symlink_to(name)
    (folder / "folders" / "tokenizer").write_text("")
    return folder


CASES = {
    "no data": ("--data-path {0}/nothing", "there is no file {0}/nothing.idx"),
    "vocabulary": ("--data-path {0}/big", "has token id 60000, outside the vocabulary of 64 tokens"),
    "data that end": (
        "--data-path {0}/ok {0}/ok --train-iters 99",
        "samples of 16 tokens, but the run needs 792",
    ),
    "no checkpoint": (
        "--mock-data --load {0}/none --exit-on-missing-checkpoint",
        "--load {0}/none: does not exist and is not the --save folder; correct the path",
    ),
    "paths": (
        "--mock-data --save {0}/file --metrics-file {0} --data-cache-path {0}/file/x --load {0}/file",
        "--data-cache-path {0}/file/x: {0}/file is a file, not a folder; use a folder that can be written\n"
        "  --metrics-file {0}: is a folder; use a file in it\n"
        "  --save {0}/file: {0}/file is a file, not a folder; use a folder that can be written\n"
        "  --load {0}/file: is a file; give the folder that contains the checkpoints, or one of them",
    ),
    "folders for files": (
        "--mock-data --save {0}/folders",
        "\n  ".join(
            f"--save {{0}}/folders: has a {kind} {name}, where the run writes a file; remove or rename that {kind}"
            for name, kind in NO_FILES.items()
        )
        + "\n  --save {0}/folders: has a tokenizer that is not a folder, where the run writes one; remove or rename it",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_user_error_is_reported_once(case: str, folder: Path, tmp_path: Path) -> None:
    flags, message = (text.format(folder) for text in CASES[case])
    text = run_forked(2, [*FLAGS, *flags.split()], tmp_path / "screen", code=2)
    assert text.count("This configuration cannot run") == text.count(message) == 1, text
    assert all(word not in text for word in ("Traceback", "RUN FAILED", "TCPStore")), text


def test_rank_0_reports_the_problems_of_paths(folder: Path, tmp_path: Path) -> None:
    """Other ranks find one of the problems before rank 0 finds it. The other ranks must not report this problem, so
    that rank 0 can report all problems."""
    flags, message = (text.format(folder) for text in CASES["paths"])

    def late(config: RunConfig) -> Iterator[Problem]:
        time.sleep(1)
        yield from unwritable(config)

    def prepare(rank: int) -> None:
        initialize.unwritable = late  # replace the function only in the process of this rank

    assert message in run_forked(2, [*FLAGS, *flags.split()], tmp_path / "screen", code=2, prepare=prepare)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "a", "WORLD_SIZE": "2"}, "RANK=a: must be a whole number; the launcher"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be from 0 to below WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT=0 must be above 0"),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "RANK=0 WORLD_SIZE=2 without MASTER_ADDR and MASTER_PORT, at which all ranks",
        ),
        ({"WORLD_SIZE": "4"}, "^WORLD_SIZE=4 without RANK: .* start the ranks with torchrun .* or unset WORLD_SIZE"),
        ({"RANK": "1", "LOCAL_RANK": "1"}, "^RANK=1 LOCAL_RANK=1 without WORLD_SIZE: .* or unset RANK LOCAL_RANK to"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "^OMPI_COMM_WORLD_SIZE=2 without RANK and WORLD_SIZE: "),
        ({"SLURM_STEP_NUM_TASKS": "x"}, "SLURM_STEP_NUM_TASKS=x: must be a whole number"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_PROCID=None: must be a whole number"),
    ],
)
def test_contradictory_launcher_variables_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Launch.from_environment(environ)


def test_an_invalid_end_time_of_the_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "soon")
    text = run_forked(1, [*FLAGS, "--tp", "1", "--mock-data"], tmp_path / "screen", code=2)
    assert "SLURM_JOB_END_TIME=soon: must be in seconds since 1970" in text


def test_a_folder_is_checked_without_changing_it(tmp_path: Path) -> None:
    assert why_unwritable(tmp_path / "a" / "b") is None and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    url = Path("s3://bucket/x")
    assert why_unwritable(url) == f"{url} is a URL, but only paths of mounted file systems are accepted here"
    assert why_unwritable(tmp_path / "file" / "x") == f"{tmp_path / 'file'} is a file, not a folder"
    if Path("/proc/self").exists():
        assert "/proc cannot be written" in (why_unwritable(Path("/proc/x")) or "")


def test_indices_in_memory_are_reported_once_per_node(folder: Path, tmp_path: Path) -> None:
    for kind in ("bin", "idx"):
        (tmp_path / f"x.{kind}").write_bytes((folder / f"ok.{kind}").read_bytes())
    (tmp_path / "cache").write_text("")
    flags = [*FLAGS, "--data-path", str(tmp_path / "x"), "--metrics-file", str(tmp_path / "metrics.jsonl")]
    assert run_forked(2, flags, tmp_path / "screen").count("keeps the indices in memory") == 1
