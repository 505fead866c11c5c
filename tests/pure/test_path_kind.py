"""What a path holds, by the files that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.core.dist_checkpointing.path_kind import Kind, kind_of, refusal

LATEST = "latest_checkpointed_iteration.txt"
TREES = {
    "": Kind.EMPTY,
    "notes.md": Kind.FOLDER,
    "metrics.jsonl": Kind.RUN,
    "outcome": Kind.RUN,
    "metadata.json": Kind.CHECKPOINT,
    "iter_0000002/manifest.json run_config.yaml": Kind.CHECKPOINTS,
    LATEST: Kind.CHECKPOINTS,
    "config.json": Kind.HUGGING_FACE,
    f"config.json {LATEST} iter_0000000/metadata.json": Kind.CHECKPOINTS,
    f"{LATEST} iter_0000000/mp_rank_00/model_optim_rng.pt": Kind.MEGATRON,
    "common.pt metadata.json": Kind.MEGATRON,
}
PATHS = {
    "folder.idx folder/x": ("folder", Kind.DATASET),
    "a.bin a.idx": ("a.bin", Kind.DATASET),
    "pytorch_model.bin": ("pytorch_model.bin", Kind.FILE),
    "a.md": ("a.md", Kind.FILE),
    "b.md": ("absent", Kind.MISSING),
}
CASES = [*((files, "", kind) for files, kind in TREES.items()), *((files, *case) for files, case in PATHS.items())]


@pytest.mark.parametrize(("files", "path", "kind"), CASES)
def test_kinds(tmp_path: Path, files: str, path: str, kind: Kind) -> None:
    (root := tmp_path / "root").mkdir()
    for file in files.split():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text("0" if file == LATEST else "")
    assert kind_of(root / path) is kind
    assert kind.value in refusal(root / path, "give another")


def test_a_refusal_says_what_to_do() -> None:
    assert kind_of("s3://bucket/folder") is Kind.REMOTE
    assert refusal("b.md", "give a checkpoint") == "b.md is missing: there is no such file or folder; give a checkpoint"


def test_a_file_of_a_model_is_refused_with_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert refusal(tmp_path / "config.json").endswith(f"did you mean its folder, {tmp_path}?")
