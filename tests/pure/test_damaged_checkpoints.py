"""Test that every kind of damage to checkpoint files is detected and reported. The newest intact checkpoint is loaded
instead of a damaged one."""

from __future__ import annotations

import json
import math
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing.integrity import MANIFEST, read_manifest
from megatron.core.dist_checkpointing.path_kind import LATEST, read_latest
from megatron.core.dist_checkpointing.sharded_tensor import ShardedBoxes
from megatron.core.dist_checkpointing.storage import CheckpointError, save
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.checkpoint_cleanup.flags import RetentionFlags
from megatron.extensions.operate.checkpoint_cleanup.retention import retain
from megatron.training.checkpoints.loading import choose_checkpoint
from megatron.training.metrics.sinks import JsonLinesSink
from megatron.training.reliability.failure_report import is_users
from tests.corpus import largest_file
from tools import inspect_checkpoint


def save_at(root: Path, iteration: int, elements: int = 400) -> Path:
    values = torch.full((elements,), float(iteration))
    return save(root, iteration, {"model.a": ShardedBoxes((elements,), [((0,), values)])}, {"n": iteration}, Axis())


def load(root: Path) -> tuple[int | None, list[str]]:
    """Load the newest intact checkpoint, and check its tensor. Return the iteration of the checkpoint and the printed
    messages."""
    said: list[str] = []
    checkpoint = choose_checkpoint(root, Axis(), said.append)
    if checkpoint is None:
        return None, said
    assert checkpoint.read("model.a")[0] == checkpoint.payload["n"]
    return checkpoint.payload["n"], said


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for iteration in (10, 20, 30):
        save_at(tmp_path, iteration)
    return tmp_path


def flip(path: Path, place: int | None = None) -> None:
    """Flip one bit, in the middle of the file by default."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit of a tensor": (lambda folder: flip(folder / "__0_0.distcp", 700), "__0_0.distcp has checksum"),
    "a flipped bit of the metadata": (lambda folder: flip(folder / "metadata.json", 1), "metadata.json has checksum"),
    "a truncated tensor file": (lambda folder: truncate(folder / "__0_0.distcp"), "bytes, not"),
    "an empty index": (lambda folder: (folder / ".metadata").write_bytes(b"") and None, ".metadata has 0 bytes"),
    "a missing tensor file": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a missing manifest": (lambda folder: (folder / MANIFEST).unlink(), "so the save was not finished"),
    "a manifest that nests too deep": (
        lambda folder: (folder / MANIFEST).write_text("[" * 100_000) and None,
        "damaged",
    ),
    "a manifest of nothing": (
        lambda folder: (folder / MANIFEST).write_text('{"files": {}}') and None,
        "manifest.json does not list .metadata, __0_0.distcp, metadata.json",
    ),
    "a damaged manifest": (lambda folder: truncate(folder / MANIFEST), "manifest.json is damaged"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_checkpoints_are_skipped_and_reported(root: Path, damage: Callable[[Path], None], said: str) -> None:
    assert load(root) == (30, [])
    damage(root / "iter_0000030")
    loaded, lines = load(root)
    assert loaded == 20 and len(lines) == 1
    assert lines[0].startswith(f"skipped checkpoint {root / 'iter_0000030'}: ") and said in lines[0]
    damage(root / "iter_0000020")
    assert load(root)[0] == 10
    damage(root / "iter_0000010")
    with pytest.raises(ValueError, match="holds no checkpoint that can be loaded") as error:
        load(root)
    assert all(f"iter_00000{number}0" in str(error.value) for number in (1, 2, 3))


def test_every_flipped_bit_is_detected(root: Path) -> None:
    path = root / "iter_0000030" / "__0_0.distcp"
    whole = path.read_bytes()
    for place in range(0, len(whole), 397):
        flip(path, place)
        assert load(root)[0] == 20, place
        path.write_bytes(whole)
    assert load(root) == (30, [])


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"files": {"a": 1}}', '{"files": {"a/b": {"bytes": 1, "crc32": 2}}}'], ids=len
)
def test_a_malformed_manifest_is_reported_without_python_names(root: Path, text: str) -> None:
    (root / "iter_0000030" / MANIFEST).write_text(text)
    found, (line,) = load(root)
    form = 'an object {"files": {name: {"bytes": number, "crc32": number}}}'
    assert found == 20 and line.endswith(f"manifest.json is damaged: it must be {form}")


@pytest.mark.parametrize("content", [b"", b"garbage", b"[" * 9000, b"PK\x03\x04" + bytes(9000)], ids=len)
def test_damage_that_passes_the_manifest_is_a_user_error(root: Path, content: bytes) -> None:
    folder = root / "iter_0000030"
    data = next(folder.glob("*.distcp"))
    data.write_bytes(content.ljust(data.stat().st_size, b"\0")[: data.stat().st_size])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"][data.name]["crc32"] = zlib.crc32(data.read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        ValueError, match=r"cannot load checkpoint \S+: on rank 0: \w+.*; restore it from a copy, or"
    ) as told:
        load(root)
    assert is_users(told.value)


@pytest.mark.parametrize("text", [None, b"", b"\n", b"garbage", b"\x93\xff\x00", b"30.5", b"9" * 5000])
def test_without_a_readable_latest_the_newest_is_taken(root: Path, text: bytes | None) -> None:
    (root / LATEST).unlink()
    if text is not None:
        (root / LATEST).write_bytes(text)
    loaded, lines = load(root)
    assert (
        loaded == 30 and len(lines) == 1 and "using the latest checkpoint found: 30" in lines[0] and LATEST in lines[0]
    )


def test_a_broken_link_is_replaced(root: Path) -> None:
    (root / "iter_0000040").symlink_to(root / "gone")
    (root / LATEST).write_text("40")
    loaded, lines = load(root)
    assert loaded == 30 and "iter_0000040: there is no manifest.json" in lines[0]
    save_at(root, 40)
    assert load(root) == (40, []) and not (root / "iter_0000040").is_symlink()


def test_a_folder_in_the_place_of_the_latest_file_is_reported(root: Path) -> None:
    (root / LATEST).unlink()
    (root / LATEST).mkdir()
    loaded, lines = load(root)
    assert (
        loaded == 30
        and "something other than a file" in lines[0]
        and "using the latest checkpoint found: 30" in lines[0]
    )


def test_checkpoints_moved_away_and_linked_do_not_stop_saves(root: Path, tmp_path_factory: Any) -> None:
    """Saving replaces or deletes symbolic links to checkpoints, but does not change the folders to which the links
    point."""
    moved = tmp_path_factory.mktemp("moved")
    for number in (10, 20, 30):
        name = f"iter_00000{number}"
        (root / name).rename(moved / name)
        (root / name).symlink_to(moved / name)
    (root / "iter_0000005.tmp").write_text("a stray file")
    (root / "iter_0000010.old").symlink_to(moved / "iter_0000010")
    assert load(root) == (30, [])
    save_at(root, 30)
    retain(RetentionFlags(keep_last=2), root, 30, [])
    save_at(root, 40)
    assert load(root) == (40, []) and load(moved / "iter_0000010") == (10, [])
    assert sorted(path.name for path in root.iterdir() if path.name != LATEST) == [
        *("iter_0000020", "iter_0000030", "iter_0000040")
    ]
    assert not (root / "iter_0000030").is_symlink() and len(list(moved.iterdir())) == 3


def test_latest_may_point_back(root: Path) -> None:
    (root / LATEST).write_text("20")
    assert load(root) == (20, [])
    (root / LATEST).write_text("25")
    loaded, lines = load(root)
    assert loaded == 20 and "skipped checkpoint 25" in lines[0]


def test_a_checkpoint_requested_by_name_is_not_replaced_by_another(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(root / "iter_0000030" / "__0_0.distcp", 700)
    with pytest.raises(ValueError, match="has checksum"):
        load(root / "iter_0000030")
    assert inspect_checkpoint.main([str(root / "iter_0000030")]) == 2
    assert "__0_0.distcp has checksum" in capsys.readouterr().err
    assert inspect_checkpoint.main([str(root)]) == 0
    shown = capsys.readouterr()
    assert "iter_0000020" in shown.out and "skipped checkpoint" in shown.err


def test_everything_in_the_checkpoint_folder_is_listed(root: Path) -> None:
    folder = root / "iter_0000030"
    assert sorted(read_manifest(folder)) == sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)


def test_a_full_disk_is_named_as_the_reason(root: Path) -> None:
    """A limit on the file size simulates a full disk, so that writing fails in the middle of a file that torch
    writes."""
    with largest_file(100_000), pytest.raises(CheckpointError, match="File too large"):
        save_at(root, 40, elements=1_000_000)
    assert read_latest(root) == 30 and load(root) == (30, [])
    save_at(root, 40)
    assert load(root) == (40, []) and not list(root.glob("*.tmp"))


def test_metrics_are_written_later_if_the_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path, 0)
    sink.write({"iteration": 1})
    with largest_file(path.stat().st_size + 5):
        for iteration in (2, 3):
            sink.write({"iteration": iteration})
        assert path.read_text() == '{"iteration": 1}\n'
    assert capsys.readouterr().err.count("cannot write metrics to") == 1
    sink.write({"iteration": 4})
    sink.close()
    assert path.read_text() == "".join(f'{{"iteration": {n}}}\n' for n in (1, 2, 3, 4))


def test_non_finite_metrics_are_distinguished_from_missing_ones(tmp_path: Path) -> None:
    sink, values = JsonLinesSink(tmp_path / "m.jsonl", 0), {"a": 1.5, "b": math.nan, "c": math.inf, "d": -math.inf}
    sink.write({"iteration": 1, "mfu": None} | values)
    sink.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    record = json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=refuse)
    assert record["mfu"] is None and math.isnan(float(record["b"]))
    assert [float(record[key]) for key in "acd"] == [1.5, math.inf, -math.inf]


def test_damaged_metrics_do_not_stop_a_run_and_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n\xff{"iteration": 2}\n{"iteration": 3}\n[4]\n5\n{"iteration": "6"}\n{"iterat')
    before = path.read_bytes()
    JsonLinesSink(path, 3).close()
    assert path.read_text() == '{"iteration": 1}\n{"iteration": 3}\n'
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == before
    assert f"{path}: lines that are not metric records are left out: 4; {tmp_path}" in capsys.readouterr().err


def test_a_record_cut_off_by_a_kill_is_not_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1}\n{"iteration": 2}\n{"iterat')
    JsonLinesSink(path, 1).close()
    assert path.read_text() == '{"iteration": 1}\n' and list(tmp_path.iterdir()) == [path]
    assert capsys.readouterr().err == ""


def test_a_start_does_not_load_all_records_of_a_long_run(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"iteration": {number}, "text": "{"x" * 1000}"}}\n' for number in range(1, 2001)))
    tracemalloc.start()
    try:
        JsonLinesSink(path, 1990).close()
        _, highest = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(path.read_text().splitlines()) == 1990
    assert highest < 300_000  # the file has 2 MB, so it was not read as a whole
