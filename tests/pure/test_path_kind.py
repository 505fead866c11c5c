"""Test that the kind of a path, such as a checkpoint or a dataset, is recognized from the files that the path
contains."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of, refusal

LATEST = "latest_checkpointed_iteration.txt"
TREES = {
    "": "empty",
    "notes.md": "folder",
    "metrics.jsonl": "run",
    "outcome": "run",
    "metadata.json": "checkpoint",
    "iter_0000002/manifest.json run_config.yaml": "checkpoints",
    LATEST: "checkpoints",
    f"{LATEST} iter_0000000/metadata.json": "checkpoints",
}
PATHS = {
    "folder.idx folder/x": ("folder", "dataset"),
    "a.bin a.idx": ("a.bin", "dataset"),
    "pytorch_model.bin": ("pytorch_model.bin", "file"),
    "a.md": ("a.md", "file"),
    "b.md": ("absent", "missing"),
}
CASES = [*((files, "", kind) for files, kind in TREES.items()), *((files, *case) for files, case in PATHS.items())]


def check_kind(root: Path, files: str, path: str, kind: str) -> None:
    """Create files below `root`, and check that `path` is recognized as `kind` and that error messages describe the
    path as this kind."""
    root.mkdir(exist_ok=True)
    for file in files.split():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("0" if file == LATEST else "")
    assert kind_of(root / path) == kind
    assert PATH_KINDS.facts(kind).about in refusal(root / path, "give another")


@pytest.mark.parametrize(("files", "path", "kind"), CASES)
def test_kinds_are_recognized_by_files(tmp_path: Path, files: str, path: str, kind: str) -> None:
    check_kind(tmp_path / "root", files, path, kind)


def test_a_refusal_states_a_remedy() -> None:
    assert kind_of("https://host/folder") == "url"
    assert "--data-path and tools/preprocess_data.py take text" in refusal("https://host/folder", "give a checkpoint")


def test_a_file_of_a_model_is_refused_with_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metadata.json").write_text("{}")
    assert refusal(tmp_path / "metadata.json").endswith(f"did you mean its folder, {tmp_path}?")
    monkeypatch.chdir(tmp_path)
    assert refusal("metadata.json").endswith(f"did you mean its folder, {tmp_path.resolve()}?")


@pytest.mark.usefixtures("forget_extensions_at_once")
def test_an_extension_adds_kinds(tmp_path: Path) -> None:
    """Path kinds that an extension adds are tried in the order of their registration. If a path is of a kind that
    --load does not accept, the error message lists the kinds that --load accepts."""
    their = {"about": "is a model of theirs", "convert": "theirs {path}"}
    PATH_KINDS.register("theirs", lambda path: (Path(path) / "theirs").exists(), order=35, **their)
    PATH_KINDS.register("their_file", lambda path: path.endswith(".theirs"), about="", order=25, loaded_as="their file")
    check_kind(tmp_path, "metrics.jsonl theirs", "", "theirs")
    assert refusal(tmp_path) == f"{tmp_path} is a model of theirs; convert it: theirs {tmp_path}"
    check_kind(tmp_path, "metadata.json theirs", "", "checkpoint")
    assert kind_of("a.theirs") == "their_file" and "or their file" in refusal("absent")
