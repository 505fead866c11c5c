"""Interleaved passes of two micro-batches: while a collective of one pass is in flight, the other pass computes.

Each pass runs in its own thread, and only one of the threads runs at a time. A pass yields after it starts a
collective, and waits for the collective when the pass resumes. Each pass needs a separate call stack and therefore a
thread, because a backward pass runs inside autograd and cannot return before it ends. With threads, layers and
recomputation stay unchanged, and the autograd graph of a micro-batch is not split. (DualPipe, arXiv 2412.19437, section
3.2.1, overlaps a forward pass with a backward pass. Megatron-LM instead splits the graph at the points at which a pass
yields here.)

The order in which passes alternate depends only on the collectives that they start, and never on time. Ranks that run
the same passes therefore launch their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch

from megatron.core.collectives import PassPair
from megatron.core.torch_private import dispatch_modes, pop_mode, push_mode
from megatron.training.step_parts import StepParts


class _Abandoned(BaseException):
    """Exception that ends one of two interleaved passes after the other pass failed."""


class BatchOverlap(PassPair):
    """Run passes of two micro-batches in alternation: a pass yields whenever it launches a collective."""

    in_turns = True

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] | None = None
        self._active = False

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both passes. The pass `first` begins, and runs in the calling thread. If one pass raises an exception,
        the other pass ends too, and `run` raises the exception in the calling thread."""
        assert not self._active, "two passes are already interleaved"
        self._active, self._turn = True, 0
        self._finished = [False, False]
        self._error: BaseException | None = None
        self._may_run = Semaphore(0), Semaphore(0)
        self._start(second)
        try:
            self._pass(0, first)
            if not self._finished[1]:
                self._may_run[0].acquire()
        finally:
            self._active = False
        if self._error is not None:
            raise self._error

    def hand_over(self) -> None:
        """Yield to the other pass. Each pass calls this method after it launches a collective. The method returns when
        the other pass yields or ends. If there is no other pass, the method returns immediately."""
        if not self._active or self._finished[1 - self._turn]:
            return
        own = self._turn
        self._switch(1 - own)
        self._may_run[own].acquire()
        if self._error is not None:
            raise _Abandoned

    def _switch(self, to: int) -> None:
        self._turn = to
        self._may_run[to].release()

    def _pass(self, number: int, body: Callable[[], None], leave: Callable[[], object] = lambda: None) -> None:
        try:
            if self._error is None:
                body()
        except _Abandoned:
            pass
        except BaseException as error:
            self._error = self._error or error
        leave()
        self._finished[number] = True
        self._switch(1 - number)

    def _start(self, body: Callable[[], None]) -> None:
        """Start the second thread, which waits for its turn and then runs a pass on the caller's CUDA stream with the
        caller's `TorchDispatchMode`s."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            Thread(target=_work, args=(self._jobs,), name="batch-overlap", daemon=True).start()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        modes = dispatch_modes()

        def job() -> None:
            self._may_run[1].acquire()
            if stream is not None:
                torch.cuda.set_stream(stream)
            for mode in modes:
                push_mode(mode)
            self._pass(1, body, lambda: [pop_mode() for _ in modes])

        self._jobs.put(job)


def _work(jobs: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        jobs.get()()


PARTS = StepParts(pair=BatchOverlap)
