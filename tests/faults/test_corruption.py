"""Damaged checkpoints of a run that resumes: what is said, what is loaded, and how it ends. And a full disk.

A run of two processes (TP2) saves at iterations 2, 4 and 6 and is then stopped. For each kind of damage the same
command goes on from a damaged copy to iteration 8; where it comes there, its last checkpoint is compared with that of
an undisturbed run, bit for bit. For a full disk the run saves on a small file system of its own, mounted for the
purpose, which a large file fills up while the run is under way. test_damaged_checkpoints.py damages files one by one.
"""

from __future__ import annotations

import multiprocessing as mp
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.dist_checkpointing.path_kind import LATEST, METADATA
from megatron.core.dist_checkpointing.storage import INDEX
from megatron.core.parallel_state import Axis
from megatron.training import training
from tests.forked import forked_ranks, join
from tests.limits import HANG
from tools.inspect_checkpoint import differences

MODEL = (
    "--cpu --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 50 --lr 1e-2 --tp 2 "
    "--mock-data --make-vocab-size-divisible-by 8 --global-batch-size 4 --eval-iters 0 --num-workers 0 "
    "--log-interval 1 --save-interval 2 --train-iters 8"
).split()
TENSORS = "__0_0.distcp"
SAID = re.compile(
    r"skipped checkpoint|taken as the latest|must hold|holds no checkpoint|does not fit|not saved|not be written"
)


@dataclass(frozen=True)
class Outcome:
    """How a start of the program ended."""

    code: int
    loaded: int | None
    """Iteration that it went on from; 0: the beginning; None: it did not come that far."""

    said: tuple[str, ...]
    """Each once, folders shortened."""

    equal: bool | None = None
    """Whether its last checkpoint is that of the undisturbed run; None: it did not come to the end."""


def train(
    save: Path,
    stop: int = 8,
    during: Callable[[], None] = lambda: None,
    prepare: Callable[[int], None] = lambda rank: None,
) -> Outcome:
    """Two ranks, resuming from and saving to one folder, up to iteration `stop`; `during` is called meanwhile, and
    `prepare` in each rank beforehand."""
    argv = [*MODEL, "--save", str(save), "--load", str(save), "--exit-interval", str(stop)]
    with tempfile.TemporaryDirectory() as elsewhere:  # not on a disk that is to be full
        screen = Path(elsewhere) / "screen"
        with forked_ranks(2, argv, screen, prepare) as ranks:
            during()
            codes = join(ranks)
        text = screen.read_text()
    found = re.search(r"loaded checkpoint of iteration (\d+)", text)
    loaded = int(found[1]) if found else 0 if "starting at iteration 0" in text else None
    said = [line.strip() for line in text.splitlines() if SAID.search(line) and "more attempt" not in line]
    return Outcome(max(codes), loaded, tuple(dict.fromkeys(_short(line, save) for line in said)))


def _short(line: str, save: Path) -> str:
    line = line.replace(f"{save}/", "").replace(str(save), "DIR")
    return re.sub(r"rank \d of 2 on \S+: checkpoint", "every rank: checkpoint", line)


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def every(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    def to_all(save: Path) -> None:
        for folder in save.glob("iter_*"):
            damage(folder / TENSORS)

    return to_all


NEWEST = "iter_0000006"
DAMAGE: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "none": (lambda save: None, 6),
    "a flipped bit in a tensor file": (lambda save: flip(save / NEWEST / TENSORS), 4),
    "a flipped bit in the index": (lambda save: flip(save / NEWEST / INDEX), 4),
    "a flipped bit in the metadata": (lambda save: flip(save / NEWEST / METADATA), 4),
    "a flipped bit in the manifest": (lambda save: flip(save / NEWEST / MANIFEST), 4),
    "a truncated tensor file": (lambda save: truncate(save / NEWEST / TENSORS), 4),
    "a missing tensor file": (lambda save: (save / NEWEST / TENSORS).unlink(), 4),
    "a missing manifest": (lambda save: (save / NEWEST / MANIFEST).unlink(), 4),
    "a missing checkpoint": (lambda save: shutil.rmtree(save / NEWEST), 4),
    "the two newest damaged": (
        lambda save: [flip(save / name / TENSORS) for name in (NEWEST, "iter_0000004")],
        2,
    ),
    "an empty `latest`": (lambda save: (save / LATEST).write_text(""), 6),
    "garbage in `latest`": (lambda save: (save / LATEST).write_bytes(b"\x93\xff\x00garbage"), 6),
    "a missing `latest`": (lambda save: (save / LATEST).unlink(), 6),
    "a number in `latest` that there is not": (lambda save: (save / LATEST).write_text("700"), 6),
    "all damaged": (every(flip), None),
}
"""Damage -> what does it, and the iteration that the run has to go on from; None: it has to stop."""


class Bench:
    """A run of six iterations to damage copies of, and an undisturbed one of eight."""

    def __init__(self, root: Path) -> None:
        self.root, self.base, self.undisturbed = root, root / "base", root / "undisturbed"
        for save, stop in ((self.base, 6), (self.undisturbed, 8)):
            outcome = train(save, stop)
            assert outcome.code == 0 and not outcome.said, outcome

    def resume(self, damage: Callable[[Path], object]) -> Outcome:
        """Goes on from a damaged copy."""
        with tempfile.TemporaryDirectory(dir=self.root) as name:
            save = Path(name) / "save"
            shutil.copytree(self.base, save)
            damage(save)
            return self.compared(save, train(save))

    def compared(self, save: Path, outcome: Outcome) -> Outcome:
        """With the end of the run, if it came there, compared with the undisturbed one."""
        if outcome.code:
            return outcome
        ends = [choose_checkpoint(folder, Axis()) for folder in (save, self.undisturbed)]
        assert ends[0] is not None and ends[1] is not None
        same = ends[0].payload["iteration"] == 8 and not differences(ends[0], ends[1])
        return Outcome(outcome.code, outcome.loaded, outcome.said, same)

    def fill_disk(self, disk: Path) -> tuple[Outcome, Outcome]:
        """(the run whose disk is full from its second save on, the same command with room again)"""
        save, filler = disk / "save", disk / "filler"
        assert train(save, 2).code == 0
        reached, filled = (mp.get_context("fork").Event() for _ in range(2))

        def fill() -> None:
            """Leaves nothing, once the first step is made."""
            assert reached.wait(HANG)
            with suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            filled.set()

        def wait_for_filler(rank: int) -> None:
            """Has the ranks make the step to iteration 4, after which they save, on a full disk."""
            step = training.train_step

            def train_step(run: training.TrainingRun, *args: Any) -> None:
                if run.progress.iteration == 3:
                    reached.set()
                    filled.wait(HANG)
                step(run, *args)

            training.train_step = train_step

        full = train(save, 6, fill, wait_for_filler)
        filler.unlink()
        return full, self.compared(save, train(save))


@contextmanager
def small_disk(megabytes: int) -> Iterator[Path]:
    """A file system of its own in memory. Raises OSError, with the reason, where mounting one is not permitted."""
    with tempfile.TemporaryDirectory(prefix="disk-") as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise OSError(f"no file system can be mounted: {error}") from None
        if done.returncode:
            raise OSError(f"no file system can be mounted: {done.stderr.strip()}")
        try:
            yield Path(name)
        finally:
            for _ in range(20):  # a rank that was killed may hold it for a moment
                if subprocess.run(["umount", name], capture_output=True).returncode == 0:
                    break
                time.sleep(0.1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("corruption"))


@pytest.mark.grid("damage", ["the two newest damaged"], list(DAMAGE))
def test_a_run_resumes_from_the_newest_whole_checkpoint(bench: Bench, damage: str) -> None:
    inflict, expected = DAMAGE[damage]
    outcome = bench.resume(inflict)
    assert outcome.loaded == expected and outcome.equal is (None if expected is None else True), outcome
    assert bool(outcome.said) == (damage != "none")
    assert damage != "the two newest damaged" or len(outcome.said) == 2


def test_a_full_disk(bench: Bench) -> None:
    try:
        with small_disk(8) as disk:
            full, after = bench.fill_disk(disk)
    except OSError as error:
        pytest.skip(str(error))
    assert full.loaded == 2 and full.code == 1
    assert any("No space left" in line and "iteration 4" in line and "given up" in line for line in full.said)
    assert any("it was the last of the run" in line for line in full.said)
    assert after.loaded == 2 and after.equal and not after.said
