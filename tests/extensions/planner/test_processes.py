"""Forked processes exit when their parent exits, and a command exits on Ctrl-C."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import pytest

from megatron.extensions.plan.planner.rehearsal.fake_rank import forked
from megatron.extensions.plan.planner.terminal import at_interrupt, end_process

FORK = multiprocessing.get_context("fork")


def _starts_a_fork(sender: Connection) -> None:
    def job() -> None:
        sender.send(os.getpid())
        time.sleep(3600)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent process may have installed a handler for the signal
    with at_interrupt(end_process):
        list(forked({0: job}, 1))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15), (signal.SIGKILL, -9)])
def test_forks_end_with_their_parent(number: int, code: int) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=_starts_a_fork, args=(sender,))
    process.start()
    sender.close()
    child = receiver.recv()
    assert process.pid is not None and child != process.pid
    os.kill(process.pid, number)
    process.join()
    assert process.exitcode == code
    with pytest.raises(EOFError):  # raised when the last process that could write to the pipe has ended
        receiver.recv()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_is_ended_once_by_either_signal(number: int) -> None:
    called: list[int] = []
    before = {each: signal.signal(each, lambda *_: called.append(2)) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with at_interrupt(lambda: called.append(1), (signal.SIGINT, signal.SIGTERM)):
            for _ in range(2):
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    assert called == [1, 2, 2]


def test_an_ignored_signal_stays_ignored() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with at_interrupt(lambda: called.append(1), (signal.SIGTERM,)):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert called == []
