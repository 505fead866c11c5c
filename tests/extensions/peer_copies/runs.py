"""Training runs that copy their state to the memory of peers, and faults that are injected into these runs. Each rank
acts as a separate host."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.peer_copies.client import HOST, folder_of
from megatron.extensions.operate.peer_copies.copies import Copies
from megatron.extensions.operate.peer_copies.hooks import PeerCopies
from megatron.training import tasks, training
from megatron.training.checkpoints.loading import choose_checkpoint
from megatron.training.reliability.launch import START
from megatron.training.run import TrainingRun
from tests.forked import forked_ranks, join
from tests.tiny import TINY

MODEL = f"{TINY} --log-interval 1 --hidden-dropout 0.1".split()


@dataclass(frozen=True)
class Planned:
    """Planned fault of one rank. The fault strikes after `step` steps, or while the state after that step is copied to
    peers."""

    kind: str
    rank: int
    """Index of the process that the launcher started. A process that starts as a spare may get a different rank
    later."""

    step: int
    start: int = 0
    """Start of the ranks in which the fault strikes: 0 for the first start in the job, 1 for the first restart, and so
    on."""

    @property
    def now(self) -> bool:
        """True if the fault is planned for the current start of the run."""
        return int(os.environ.get(START, "0")) == self.start

    @property
    def strikes_in_step(self) -> bool:
        """True if the fault strikes at the beginning of a step."""
        return self.kind.partition(" ")[0] in ("error", "kill", "stop", "copied", "workers", "host", "term", "exit")


class InjectedError(RuntimeError):
    """Error that a test injects into a rank."""


def await_copies(run: TrainingRun) -> None:
    """Wait until the copies of the last step are complete."""
    for callback in run.callbacks:
        if isinstance(callback, PeerCopies) and callback._copies is not None:
            callback._copies.wait()


def faulty_main(faults: Sequence[Planned], breaks: Callable[[str], None]) -> Callable[[list[str]], int]:
    """Return a `pretrain_gpt.main` in which the planned faults strike.

    The following faults strike at the beginning of a step. If the name of a fault has the prefix "start ", as in "start
    term", the fault strikes while the rank resumes instead.
        error: the rank raises an error.
        kill, stop: the rank receives SIGKILL or SIGSTOP.
        exit: the rank exits with code 3.
        term, "term kill": the rank's parent receives SIGTERM. With "term kill", the rank then receives SIGKILL.
        "workers 2 3": processes 2 and 3 of the launcher are killed.
        "host 1": all processes of the host are killed, and its copies are deleted.

    The following faults kill the rank at another moment:
        copied: as soon as the copies of the last step are complete.
        copy: while the rank's copies are sent.
        agreed: as soon as the rank's own copies are stored.
        save: in the first save after at least `step` steps.
        end: before the last save, when the copies of the last step are complete.
        start: while the rank resumes.
    """

    def main(argv: list[str]) -> int:
        rank, made = int(os.environ["RANK"]), training.train_step
        mine = [fault for fault in faults if fault.rank == rank]

        def step(run: TrainingRun) -> None:
            for fault in mine:
                if fault.now and fault.step == run.progress.iteration and fault.strikes_in_step:
                    if fault.kind == "copied":
                        await_copies(run)
                    breaks(fault.kind)
            made(run)

        def dies(method: str, kind: str) -> None:
            whole = getattr(Copies, method)

            def broken(copies: Copies, iteration: int, *rest: object) -> None:
                if any(fault.now and fault.kind == kind and fault.step == iteration for fault in mine):
                    breaks("kill")
                whole(copies, iteration, *rest)

            setattr(Copies, method, broken)

        whole_end = training.finish

        def finish(run: TrainingRun) -> None:
            if any(fault.now and fault.kind == "end" for fault in mine):
                await_copies(run)
                breaks("kill")
            whole_end(run)

        whole_save = tasks.save

        def save(run: TrainingRun) -> None:
            if any(fault.now and fault.kind == "save" and fault.step <= run.progress.iteration for fault in mine):
                threading.Timer(0.02, breaks, ["kill"]).start()
            whole_save(run)

        training.train_step, training.finish = step, finish
        training.save = tasks.save = save
        dies("_send", "copy")
        dies("_agree", "agreed")
        built = training.build_run

        def build(*parts: Any) -> TrainingRun:
            for fault in mine:
                if fault.now and fault.kind.startswith("start"):
                    breaks(fault.kind.removeprefix("start").strip() or "kill")
            return built(*parts)

        training.build_run = build  # type: ignore[assignment]
        return pretrain_gpt.main(argv)

    return main


def lost_little(event: dict[str, Any], said: str) -> bool:
    """Return True if a recovery lost at most one step, or more after a copy that failed. On a busy machine, a host may
    not answer in time; the copies of an earlier step are then kept, as the log states."""
    return event["steps_lost"] <= 1 or "copies in memory of the last step are incomplete" in said


def lost_workers(kind: str, per_host: int) -> list[int]:
    """Return the indices of the launcher's processes that a fault ends permanently."""
    words = kind.removeprefix("start ").split()
    if words[0] == "host":
        return list(range(int(words[1]) * per_host, (int(words[1]) + 1) * per_host))
    return [int(word) for word in words[1:]] if words[0] == "workers" else []


class Run:
    """Training run that is restarted in the same folder after each fault. If `per_host` is 2, ranks 2 i and 2 i + 1 are
    on host i."""

    def __init__(self, folder: Path, ranks: int, flags: Sequence[str] = (), per_host: int = 1) -> None:
        self.folder, self.ranks, self.per_host = folder, ranks, per_host
        self.save, self.memory, self.screen = folder / "save", folder / "memory", folder / "screen"
        self.memory.mkdir(parents=True)
        saves = ["--save", str(self.save), "--load", str(self.save)]
        copies = ["--peer-copies", "1", "--peer-copy-path", str(self.memory), "--peer-copy-keep-minutes", "1"]
        self.flags = [*MODEL, *saves, *copies, *flags]

    def _prepare(self, rank: int) -> None:
        os.environ[HOST] = f"host{rank // self.per_host}"
        (self.folder / f"pid{rank}").write_text(str(os.getpid()))

    def _breaks(self, kind: str) -> None:
        """Inject a fault of the given kind. The rank that the fault strikes calls this method."""
        if kind == "error":
            raise InjectedError("injected")
        if kind.startswith("host"):
            self.lose(int(kind.split()[1]))
        for worker in lost_workers(kind, self.per_host):
            os.kill(int((self.folder / f"pid{worker}").read_text()), signal.SIGKILL)
        if kind.startswith("term"):
            os.kill(os.getppid(), signal.SIGTERM)
        if kind == "exit":
            os._exit(3)
        if kind in ("kill", "stop", "copied", "term kill"):
            os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    def start(self, *faults: Planned, ranks: int | None = None, flags: Sequence[str] = (), code: int = 0) -> str:
        """Launch the ranks, wait until they end, and return their output. Without faults, the ranks must exit with
        `code`."""
        world = ranks or self.ranks
        main = faulty_main(faults, self._breaks)
        with forked_ranks(world, [*self.flags, *flags], self.screen, self._prepare, main) as processes:
            codes = join(processes)
        text = self.screen.read_text()
        lost = {worker for fault in faults for worker in lost_workers(fault.kind, self.per_host)}
        codes = [code for worker, code in enumerate(codes) if worker not in lost]
        again = "--restarts-in-job" in (*self.flags, *flags)
        ended = all(codes) if faults and not again else codes == [code] * len(codes)
        assert ended, f"{codes}\n{text[-6000:]}"
        return text

    def held_by(self, host: int) -> Path:
        """Return the folder in which a host stores the copies that it holds."""
        before = os.environ.get(HOST)
        os.environ[HOST] = f"host{host}"
        try:
            return folder_of(str(self.memory), str(self.save))
        finally:
            os.environ.pop(HOST) if before is None else os.environ.update({HOST: before})

    def lose(self, host: int) -> None:
        """Remove a host: kill the process that holds its copies, and delete its memory."""
        folder = self.held_by(host)
        with suppress(OSError):
            os.kill(json.loads((folder / "holder.json").read_text())["pid"], signal.SIGKILL)
        gone = folder.with_name(f"lost-{folder.name}")  # ranks may still write to the folder, so rename it atomically
        os.replace(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)

    def end(self) -> None:
        """Kill the processes that still hold copies in memory after a test."""
        for about in self.memory.glob("*/holder.json"):
            with suppress(OSError):
                os.kill(json.loads(about.read_text())["pid"], signal.SIGKILL)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the run's events whose name is `name`."""
        lines = (self.save / "run_events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def assert_equal(self, other: Run) -> None:
        """Assert that every step's losses and the final checkpoints are bitwise equal to those of another run."""
        assert self.metrics() == other.metrics()
        one, two = (choose_checkpoint(run.save, Axis()) for run in (self, other))
        assert one is not None and two is not None and one.tensors.keys() == two.tensors.keys()
        for key in one.tensors:
            assert one.read(key).equal(two.read(key)), key
        for name in ("iteration", "consumed_samples", "scheduled_samples", "optimizer"):
            assert one.payload[name] == two.payload[name], name

    def assert_close(self, other: Run, tolerance: float) -> None:
        """Assert that losses and gradient norms of every step equal those of another run up to rounding."""
        mine, others = self.metrics(), other.metrics()
        assert [each[0] for each in mine] == [each[0] for each in others]
        for here, there in zip(mine, others, strict=True):
            assert here == pytest.approx(there, rel=tolerance), f"{here} is not {there}"

    def metrics(self) -> list[tuple[int, float, float]]:
        """Return iteration, loss and gradient norm of each step."""
        records = [json.loads(line) for line in (self.save / "metrics.jsonl").read_text().splitlines()]
        return [(each["iteration"], each["lm_loss"], each["grad_norm"]) for each in records if "lm_loss" in each]
