"""Runs functions in forked processes, some at a time: each has the state of this process, and leaves it as it is."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

from megatron.extensions.planner.processes import end_with_parent

T = TypeVar("T")


@dataclass(frozen=True)
class Lost:
    """A job whose process ended without a result."""

    job: int
    how: str
    """`SIGKILL`, or `exit code 1`."""


def forked(jobs: Sequence[Callable[[], T]], workers: int) -> Iterator[T | Lost]:
    """The results of jobs in the order in which they end, `Lost` for those whose process dies without one. Where the
    system has no room for another process, fewer run at a time; raises OSError if it has none for one. Results must
    pickle."""
    context, waiting = mp.get_context("fork"), list(reversed(range(len(jobs))))
    running: dict[Connection, tuple[int, Any]] = {}
    workers = max(1, workers)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(sender, jobs[waiting[-1]], os.getpid()))
                try:
                    process.start()
                except OSError:
                    receiver.close()
                    if not running:
                        raise
                    workers = len(running)
                    break
                finally:
                    sender.close()
                running[receiver] = waiting.pop(), process
            for receiver in cast("list[Connection]", wait(list(running))):
                job, process = running[receiver]
                try:
                    result = receiver.recv()
                except (EOFError, ConnectionResetError):
                    process.join()
                    result = Lost(job, _how(process.exitcode or 0))
                process.join()
                receiver.close()
                del running[receiver]
                yield result
    finally:
        for _, process in running.values():
            process.kill()
            process.join()


def _how(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _send_result(sender: Connection, job: Callable[[], object], parent: int) -> None:
    end_with_parent(parent)
    gc.freeze()  # looking through what came with the fork would copy its pages
    sender.send(job())
    sender.close()
