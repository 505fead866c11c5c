"""Spans of one rank while it is traced, on the host's clock and, on GPUs, between events of the stream."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch

MAIN_TRACK = "training thread"


class Span(NamedTuple):
    """Something that took time. Times are nanoseconds of `time.perf_counter_ns`, which processes of one host share."""

    track: str
    name: str
    category: str
    start: int
    stop: int
    args: Mapping[str, Any]


class Recorder:
    """Collects the spans of a rank. Never waits for the device before `take`.

    A span of a thread lies within, or beside, the others of that thread. `in_flight` are those of collectives, which
    may overlap. On CUDA each span of a thread has a second one between two events of the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        self.spans: list[Span] = []
        self.in_flight: list[Span] = []
        self._main = threading.get_ident()
        self._tracks = {self._main: MAIN_TRACK}
        self._events: list[tuple[Span, torch.cuda.Event, torch.cuda.Event]] = []
        if self.cuda:
            torch.cuda.synchronize(device)
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()
            self._origin.synchronize()
            self._origin_ns = time.perf_counter_ns()

    def span(self, name: str, category: str, args: Mapping[str, Any] | None = None) -> _OpenSpan:
        """A context manager that records the time of its block."""
        return _OpenSpan(self, name, category, args or {})

    def track(self) -> str:
        """The name of the calling thread's track."""
        thread = threading.get_ident()
        if thread not in self._tracks:
            self._tracks[thread] = f"thread {len(self._tracks)}"
        return self._tracks[thread]

    def event(self) -> torch.cuda.Event | None:
        """An event recorded in the current stream; None on CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, span: Span, start: torch.cuda.Event | None = None, stop: torch.cuda.Event | None = None) -> None:
        """Adds a span of the calling thread, with the events between which the device was at work on it."""
        self.spans.append(span)
        if start is not None and stop is not None:
            self._events.append((span, start, stop))

    def take(self) -> list[Span]:
        """Spans of threads, and of the device's streams. Waits for the device."""
        if not self.cuda:
            return self.spans
        torch.cuda.synchronize(self.device)
        on_device = [
            span._replace(track=f"GPU, {span.track}", start=self._host_time(start), stop=self._host_time(stop))
            for span, start, stop in self._events
        ]
        return self.spans + on_device

    def _host_time(self, event: torch.cuda.Event) -> int:
        return self._origin_ns + round(self._origin.elapsed_time(event) * 1e6)


class _OpenSpan:
    """One block under way."""

    __slots__ = ("args", "category", "event", "name", "recorder", "start")

    def __init__(self, recorder: Recorder, name: str, category: str, args: Mapping[str, Any]) -> None:
        self.recorder, self.name, self.category, self.args = recorder, name, category, args

    def __enter__(self) -> None:
        self.event = self.recorder.event()
        self.start = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop, recorder = time.perf_counter_ns(), self.recorder
        span = Span(recorder.track(), self.name, self.category, self.start, stop, self.args)
        recorder.add(span, self.event, recorder.event())
