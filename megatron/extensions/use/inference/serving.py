"""Loop in which one thread runs the generation engine on behalf of all threads that submit requests."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.extensions.use.inference.generation import Engine, Generation, Request

HEARTBEAT = 2.0
"""Interval in seconds at which an idle leader checks that the other ranks are alive."""


class Progress(NamedTuple):
    """Progress of the text for one request after a generation step."""

    choice: int
    text: str
    tokens: int
    finish_reason: str | None
    error: str | None = None


@dataclass(eq=False)
class Job:
    """Requests that are answered together. The engine's thread calls `tell` to report the progress of each request."""

    requests: Sequence[Request]
    deadline: float
    tell: Callable[[Progress], object]
    generations: list[Generation] = field(default_factory=list)
    """One generation per request. Only the engine's thread may access the generations until all of them have a
    finish_reason."""


class Busy(Exception):
    """Raised if too many requests are waiting."""


class EngineLoop:
    """Loop that runs the engine in the main thread. Other threads submit jobs, and the loop sends the results to these
    threads. After a call of `stop`, active requests may continue for at most `grace` seconds before `run` returns.
    """

    def __init__(self, engine: Engine, most_waiting: int, grace: float = 5.0) -> None:
        self.engine = engine
        self.most_waiting = most_waiting
        self.grace = grace
        self._inbox: queue.SimpleQueue[tuple[str, Job] | None] = queue.SimpleQueue()
        self._owner: dict[Generation, tuple[Job, int]] = {}
        self._pending, self._lock = 0, threading.Lock()
        """Number of requested sequences that are not complete yet, and the lock that protects this number."""
        self.stopping = threading.Event()
        self.failure: str | None = None
        """Reason why the engine failed. None if the engine has not failed."""

    def submit(self, requests: Sequence[Request], seconds: float, tell: Callable[[Progress], object]) -> Job:
        """Submit a job that ends with a timeout if it is not complete after `seconds`. The engine's thread calls `tell`
        to report the progress of each request. This method may be called from any thread.

        Raises Busy if too many sequences are waiting, or if the server is shutting down."""
        with self._lock:
            if self.stopping.is_set():
                raise Busy("the server is shutting down")
            if self._pending + len(requests) > self.engine.rows + self.most_waiting:
                raise Busy(
                    f"{self._pending} texts are active or waiting, and {len(requests)} more are too many; try later"
                )
            self._pending += len(requests)
        job = Job(requests, time.monotonic() + seconds, tell)
        self._inbox.put(("submit", job))
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a job whose result is no longer needed. This method may be called from any thread."""
        self._inbox.put(("cancel", job))

    def stop(self) -> None:
        """Make `run` return. This method may be called from any thread or from a signal handler."""
        self.stopping.set()
        self._inbox.put(None)

    @property
    def pending(self) -> int:
        """Number of active or waiting sequences."""
        return self._pending

    def run(self) -> None:
        """Run the loop until `stop` is called. If the engine raises an exception, report the failure to all jobs, and
        re-raise the exception."""
        try:
            while not self.stopping.is_set():
                self._turn(HEARTBEAT)
            until = time.monotonic() + self.grace
            while self._owner and time.monotonic() < until:
                self._turn(0.1)
        except Exception as error:
            self.failure = str(error)
            raise
        finally:
            self.stopping.set()
            self._take(0)
            for found in list(self._owner):
                self._tell(
                    found, "error", "the server was stopped" if self.failure is None else "the server has failed"
                )

    def _turn(self, seconds: float) -> None:
        if not self._take(seconds if self.engine.idle else 0) and self.engine.idle:
            self.engine.beat()
        now = time.monotonic()
        for job in dict.fromkeys(job for job, _ in self._owner.values() if job.deadline < now):
            self._end(job, "timeout")
        if not self.engine.idle:
            for found in self.engine.step():
                self._tell(found)

    def _take(self, seconds: float) -> bool:
        """Process the calls of `submit` and `cancel` from other threads. If there is no call yet, wait up to `seconds`
        for the first one. Return False if no call arrives in this time."""
        taken = False
        while True:
            try:
                asked = self._inbox.get(timeout=seconds) if seconds and not taken else self._inbox.get_nowait()
            except queue.Empty:
                return taken
            taken = True
            if asked is None:
                continue
            what, job = asked
            if what == "submit":
                self._begin(job)
            else:
                self._end(job, "cancelled")

    def _begin(self, job: Job) -> None:
        job.generations += [self.engine.submit(request) for request in job.requests]
        for index, found in enumerate(job.generations):
            self._owner[found] = job, index
        for found in job.generations:
            if found.finish_reason is not None:
                self._tell(found)

    def _tell(self, found: Generation, reason: str | None = None, error: str | None = None) -> None:
        """Send the progress of a generation to the thread that requested it. If `reason` is not None, the generation
        has ended."""
        if found not in self._owner:
            # The text was cancelled, so nothing is sent.
            return
        job, index = self._owner[found]
        reason = reason or found.finish_reason
        if reason is not None:
            # Update `_pending` before calling `tell`, because the receiver may read `_pending`.
            del self._owner[found]
            with self._lock:
                self._pending -= 1
        job.tell(Progress(index, found.text, len(found.tokens), reason, error or found.error))

    def _end(self, job: Job, reason: str) -> None:
        for found in job.generations:
            if found in self._owner:
                self.engine.cancel(found)
                self._tell(found, reason)
