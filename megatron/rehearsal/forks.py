"""Runs functions in forked processes, some at a time: each has the state of this process, and leaves it as it is."""

from __future__ import annotations

import multiprocessing as mp
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar, cast

T = TypeVar("T")


def forked(jobs: Sequence[Callable[[], T]], workers: int) -> Iterator[T]:
    """The results of jobs in the order in which they end. Raises RuntimeError if a process dies without one, as where
    the system has ended it. Results must pickle."""
    context, waiting = mp.get_context("fork"), list(reversed(jobs))
    running: dict[Connection, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, workers):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_send_result, args=(sender, waiting.pop()))
                process.start()
                sender.close()
                running[receiver] = process
            for receiver in cast(list[Connection], wait(list(running))):
                process = running.pop(receiver)
                try:
                    result = receiver.recv()
                except EOFError:
                    process.join()
                    code = process.exitcode or 0
                    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                    raise RuntimeError(f"a forked process ended by {how} without a result") from None
                finally:
                    receiver.close()
                process.join()
                yield result
    finally:
        for process in running.values():
            process.kill()
            process.join()


def _send_result(sender: Connection, job: Callable[[], object]) -> None:
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal; the first ends the others
    sender.send(job())
    sender.close()
