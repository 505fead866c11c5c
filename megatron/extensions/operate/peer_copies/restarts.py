"""--restarts-in-job: starts ranks that have failed again, within the processes of the launcher.

The process that the launcher has started imports torch and forks a child for each start of its rank, so that it does
not end with the rank, and the launcher sees no failure. A new child has all modules imported. When a child of any rank
fails, all children end, and all parents meet at the store before they fork again: no process of the start before is
left then. Where a parent is missing, as on a lost host, all end, and the launcher starts the ranks.

Keys of the store: again/N, asks for start N; here/N, the number of parents that have come to start N; over, a parent
that has ended for good. The store is that of the launcher, or else of rank 0's parent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from itertools import count
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch.distributed as dist

from megatron.extensions.operate.peer_copies.flags import RestartConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Log, Task
from megatron.training.reliability.launch import SIGNALS, START, Launch
from megatron.training.reliability.lossy_output import flush_output
from megatron.training.reliability.rank_store import launcher_has_store, meet
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.starts import Attempt
from megatron.training.run import TrainingRun

LOOK = 0.05
"""Seconds between two looks at the child."""

ASK = 0.4
"""Seconds between two looks at the store."""

GRACE = 8.0
"""Seconds in which a child ends by itself after another rank has failed."""

STOPPED = 6.0
"""Seconds for which a child may be stopped (SIGSTOP) while its parent runs."""

ROLL = 15.0
"""Seconds in which all parents come to a start."""

ANSWER = 8.0
"""Seconds in which a store that can be reached answers."""

PR_SET_PDEATHSIG = 1

IMPORTED_LATE = ("torch._dynamo", "megatron.training.training")
"""Modules that take seconds to import, which torch and this program import on first use."""

T = TypeVar("T")

_progress: mmap.mmap | None = None
"""The last complete iteration of the child, in memory that the parent shares."""


class ReportsProgress(Callback):
    """Tells the parent of a rank how far the rank is."""

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        def report() -> None:
            if _progress is not None:
                _progress[:8] = run.progress.iteration.to_bytes(8, "little")

        return (Task("progress for the parent", 1, report, counts=True, reads_result=False),)


class LostStoreError(ConnectionError):
    """The store of the parents does not answer."""


def answered(call: Callable[[], T], seconds: float = ANSWER) -> T:
    """The result of a call to the store. Raises LostStoreError if it fails, or does not return in time."""
    results = list[T]()

    def run() -> None:
        try:
            results.append(call())
        except RuntimeError:
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not results:
        raise LostStoreError("the store of the ranks does not answer")
    return results[0]


@dataclass
class Parents:
    """What the parents of all ranks tell each other."""

    store: dist.Store
    world: int

    @classmethod
    def of(cls, config: RunConfig, launch: Launch) -> Parents:
        """Connects to the parents of the other ranks. Rank 0's parent opens a store if the launcher has none, which the
        children then use too."""
        launch.export(os.environ)
        store = meet(launch, timedelta(minutes=config.parallel.startup_timeout_minutes), "parents")
        if launch.world_size > 1 and not launcher_has_store():
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return cls(store, launch.world_size)

    def ask(self, number: int) -> None:
        """Asks for a start."""
        answered(lambda: self.store.set(f"again/{number}", "1"))

    def asked(self, number: int) -> bool:
        """Return whether a parent has asked for a start."""
        return answered(lambda: self.store.check([f"again/{number}"]))

    def leave(self) -> None:
        """Says that this parent makes no other start."""
        answered(lambda: self.store.set("over", "1"))

    def gather(self, number: int) -> str:
        """Waits until all parents have come to a start. Returns why they cannot; empty if they have."""
        answered(lambda: self.store.add(f"here/{number}", 1))
        limit = time.monotonic() + ROLL
        while (there := answered(lambda: self.store.add(f"here/{number}", 0))) < self.world:
            if answered(lambda: self.store.check(["over"])):
                return "a rank has ended for good"
            if time.monotonic() > limit:
                return f"{self.world - there} of {self.world} ranks did not come back"
            time.sleep(LOOK)
        return ""


class Kept:
    """The child of a rank's parent."""

    def __init__(self, attempt: Attempt, number: int) -> None:
        flush_output()
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            code = 1
            try:
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                os.environ[START] = str(number)
                code = attempt()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                flush_output()
                os._exit(code)

    def ended(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def is_stopped(self) -> bool:
        """Return whether a signal has stopped it."""
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def signal(self, number: int) -> None:
        """Sends it a signal; it may have ended."""
        os.kill(self.pid, number)


def is_failure(code: int) -> bool:
    """Return whether a start has failed in a way that another one may not."""
    return code == ExitCode.FAILED or code < 0


def start_again(config: RunConfig, launch: Launch, attempt: Attempt) -> int:
    """Makes the attempts of a rank: another one after each failure, unless --restarts-in-job in a row have led to no
    further step. Returns the exit code of the last."""
    global _progress
    _progress = mmap.mmap(-1, 8)
    for name in IMPORTED_LATE:
        import_module(name)  # once here, instead of by each start
    limit = config.options(RestartConfig).restarts_in_job
    parents = Parents.of(config, launch)
    best, fruitless = -1, 0
    for number in count():
        code = _one_start(Kept(attempt, number), parents, number)
        made = int.from_bytes(_progress[:8], "little")
        fruitless = 1 if made > best else fruitless + 1
        best = max(best, made)
        try:
            if not is_failure(code) or fruitless > limit:
                why = "" if not is_failure(code) else f"{limit} starts in a row made no further step"
                parents.leave()
            else:
                parents.ask(number + 1)
                why = parents.gather(number + 1)
                if not why:
                    continue
        except LostStoreError as error:
            why = str(error)
        if why and is_failure(code):
            print(f"rank {launch.rank} is not started again in the job: {why}", file=sys.stderr, flush=True)
        break
    return code if code >= 0 else ExitCode.FAILED


def _one_start(child: Kept, parents: Parents, number: int) -> int:
    """Waits for the end of a child, passes signals on to it, and ends it after another rank has failed. Returns its
    exit code."""

    def forward(received: int, frame: FrameType | None) -> None:
        child.signal(received)

    handlers = {each: signal.signal(each, forward) for each in SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        ask_at, end_at = time.monotonic(), float("inf")
        ran_at = ask_at
        while (code := child.ended()) is None:
            now = time.monotonic()
            ran_at = ran_at if child.is_stopped() else now
            if now > min(end_at, ran_at + STOPPED):
                child.signal(signal.SIGKILL)
                end_at = ran_at = float("inf")
            if now > ask_at and end_at == float("inf"):
                ask_at = now + ASK
                try:
                    end_at = now + GRACE if parents.asked(number + 1) else end_at
                except LostStoreError:
                    ask_at = float("inf")  # the child finds out
            time.sleep(LOOK)
        return code
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
