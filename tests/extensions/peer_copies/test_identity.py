"""A run resumes from copies in memory only if they belong to the current content of the --save folder. It is not
sufficient that the path of the folder is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.extensions.operate.peer_copies.client import folder_of
from megatron.extensions.operate.peer_copies.identity import keep_identity, new_identity, read_identity
from megatron.extensions.operate.peer_copies.sets import Copy, Inventory
from tests.extensions.peer_copies.runs import Planned, Run
from tests.pure.test_ranged_file import ROOT


def test_copies_of_a_deleted_folder_are_not_loaded(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    try:
        run.start(Planned("copied", 0, 2))
        shutil.rmtree(run.save)
        said = run.start(Planned("copied", 0, 2))
        assert "memory are not used, and are deleted: they do not belong to the current content of --save" in said
        assert "loaded checkpoint" not in said and run.metrics()[0][0] == 1
        said = run.start()
        assert "loaded checkpoint of iteration 2 from copies" in said
        assert [each[0] for each in run.metrics()] == [1, 2, 3, 4]
    finally:
        run.end()


def test_missing_copies_are_reported(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    try:
        run.start(Planned("copied", 0, 2))
        run.lose(0)
        said = run.start()
        assert (
            "copies in memory are not used: no host holds copies of the previous start; hosts keep copies for 1 min"
            in said
        )
        assert "loaded checkpoint" not in said and run.metrics()[0][0] == 1
        assert "copies in memory" not in run.start(flags=["--train-iters", "5"])
    finally:
        run.end()


def test_copies_are_not_loaded_after_checkpoints_were_deleted(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 1, ["--train-iters", "6", "--save-interval", "3", "--no-async-save"])
    try:
        run.start(Planned("copied", 0, 4))
        run.start(Planned("copied", 0, 5))  # this start ends before it saves a checkpoint
        shutil.rmtree(run.save / "iter_0000003")
        (run.save / "latest_checkpointed_iteration.txt").unlink()
        said = run.start()
        assert "copies in memory are not used: --load was set back to iteration 0 since" in said
        assert "loaded checkpoint" not in said
    finally:
        run.end()


def test_copies_are_not_loaded_after_a_start_without_them(tmp_path: Path) -> None:
    run = Run(tmp_path, 1, ["--train-iters", "6", "--save-interval", "3", "--no-async-save"])
    try:
        run.start(Planned("copied", 0, 5))
        run.start(flags=["--peer-copies", "0", "--exit-interval", "4", "--lr", "3e-2"])
        said = run.start()
        assert "memory are not used, and are deleted: they do not belong to the current content of --save" in said
        assert f"loaded checkpoint of iteration 4 from {run.save}" in said
    finally:
        run.end()


def test_a_local_checkpoint_that_is_not_uploaded_hides_no_copies(tmp_path: Path) -> None:
    flags = ["--save-local", str(tmp_path / "local"), "--save-local-interval", "1", "--save-interval", "9"]
    run = Run(tmp_path / "run", 1, [*flags, "--no-async-save"])
    try:
        run.start(Planned("copied", 0, 2))
        assert "loaded checkpoint of iteration 2 from copies" in run.start()
    finally:
        run.end()


def inventory_of(*identities: str) -> Inventory:
    names = {f"g{number:06d}-0123abcd": identity for number, identity in enumerate(identities, 1)}
    copies = tuple(Copy("host", name, 3, "0-own", "0-own.0") for name in names)
    return Inventory(copies, dict.fromkeys(names, ("0-own",)), names)


def test_copies_of_another_identity_do_not_count() -> None:
    held = inventory_of("one", "two", "")
    assert [copy.generation[:7] for copy in held.of_folder("two").copies] == ["g000002"]
    assert not held.of_folder("three").copies and not held.of_folder(None).copies
    assert not held.of_folder("three").parts


def test_each_start_without_copies_gives_the_folder_another_identity(tmp_path: Path) -> None:
    save = tmp_path / "runs" / "a"
    assert read_identity(save) is None
    (first, _), (second, problem) = new_identity(save), new_identity(save)
    assert first != second == read_identity(save) and not problem
    keep_identity(save, first)  # the folder already belongs to another run
    assert read_identity(save) == second
    shutil.rmtree(save)
    save.mkdir()
    keep_identity(save, first)
    assert read_identity(save) == first
    stored, _ = new_identity(ROOT)
    assert read_identity(ROOT) == stored
    (tmp_path / "file").touch()
    assert "FileExistsError" in new_identity(tmp_path / "file")[1]


def test_copies_for_a_url_do_not_depend_on_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = folder_of("/dev/shm", str(ROOT)), folder_of("/dev/shm", "runs/a")
    monkeypatch.chdir(tmp_path)
    assert folder_of("/dev/shm", f"{ROOT}/") == before[0] and folder_of("/dev/shm", "runs/a") != before[1]
