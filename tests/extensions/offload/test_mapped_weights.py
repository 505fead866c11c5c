"""Tests of --offload-weights-folder, which stores weights, gradients and states in files. Results are bit-identical, no
files are left behind, and free disk space is checked."""

from __future__ import annotations

import shlex
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from megatron.extensions.memory.offload import mapped_files
from megatron.extensions.memory.offload.mapped_files import MappedFiles
from megatron.testing.local_run import local_run
from megatron.testing.snapshot import train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from tests.harness import run_world
from tests.tiny import TINY

MODEL = f"{TINY} --hidden-size 64 --vocab-size 64 --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 "
STREAM = "--optimizer-cpu-offload --offload-weights "
ZERO3 = "--data-parallel-sharding-strategy optim_grads_params "
AWARE = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16 "


@pytest.mark.parametrize(("ranks", "flags"), [(1, "--bf16"), (2, f"--bf16 {AWARE} {ZERO3}"), (1, "--fp32")])
def test_weights_in_files_train_to_the_same_bits(ranks: int, flags: str, tmp_path: Path) -> None:
    """All results, including the gradient norm, are bit-identical to those of a run that keeps the weights in memory.
    The folder lists no files, because the files are created without names."""
    argv = shlex.split(f"{MODEL} {flags} {STREAM}")
    memory = train_in_world(ranks, argv)
    files = train_in_world(ranks, [*argv, "--offload-weights-folder", str(tmp_path / "new")])
    assert memory.tensors.keys() == files.tensors.keys() and len(memory.tensors) > 50
    assert [key for key in memory.tensors if not torch.equal(memory.tensors[key], files.tensors[key])] == []
    assert list((tmp_path / "new").iterdir()) == []


def _taken(rank: int, world_size: int, flags: str, folder: str) -> tuple[int, int]:
    """Return two sizes in bytes: the free disk space that the run required, and the size of the files that it
    created."""
    asked: list[int] = []
    taken: list[int] = []
    check, zeros = mapped_files.check_room, MappedFiles.zeros

    def counted(self: MappedFiles, numel: int, dtype: torch.dtype) -> torch.Tensor:
        taken.append(numel * dtype.itemsize)
        return zeros(self, numel, dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mapped_files, "check_room", lambda folder, needed, world: asked.append(needed))
        patch.setattr(MappedFiles, "zeros", counted)
        argv = [*shlex.split(f"{MODEL} {flags} {STREAM}"), "--offload-weights-folder", folder]
        with local_run(resolve_legal(parse_args(argv), world_size), rank, world_size) as run:
            memory = [bucket.param_shard for bucket in run.ddp.units.buckets]  # type: ignore[attr-defined]
            mapped = Path("/proc/self/maps").read_text()
            assert mapped.count(f"{folder}/.weights-") >= len(memory)
            check(folder, 0, run.runtime.state.world)
    return asked[0], sum(taken)


@pytest.mark.parametrize(("ranks", "flags"), [(1, f"--bf16 {AWARE}"), (2, f"--fp32 {ZERO3}")])
def test_the_checked_space_equals_the_size_of_the_files(ranks: int, flags: str, tmp_path: Path) -> None:
    for asked, taken in run_world(ranks, _taken, flags, str(tmp_path)):
        assert asked == taken > 0


def _starts(rank: int, world_size: int, folder: str) -> str:
    usage = namedtuple("usage", "total used free")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 10**6))
        argv = [*shlex.split(f"{MODEL} --bf16 {STREAM} {ZERO3}"), "--offload-weights-folder", folder]
        try:
            with local_run(resolve_legal(parse_args(argv), world_size), rank, world_size):
                return ""
        except ValueError as error:
            return str(error)


def test_a_full_disk_is_refused_before_files_are_created(tmp_path: Path) -> None:
    """The error message states how many bytes all ranks that share the disk need in total."""
    for said in run_world(2, _starts, str(tmp_path)):
        assert said.startswith(f"--offload-weights-folder {tmp_path}: ") and "are needed for weights, gradients" in said
        assert said.endswith("has 976.56 KiB; free space, or use a folder on a different disk")


def test_a_file_without_room_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped_files.os, "posix_fallocate", full)
    with pytest.raises(ValueError, match=r"cannot be reserved \(No space left on device\); free space"):
        MappedFiles(str(tmp_path)).zeros(1000, torch.float32)
    assert list(tmp_path.iterdir()) == []
