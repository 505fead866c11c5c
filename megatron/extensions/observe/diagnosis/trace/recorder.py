"""Recorder of one rank's spans during a trace. Spans are measured with the host's clock. On GPUs, spans are also
measured between stream events.

Collectives and messages are recorded by wrapping torch.distributed. Steps that are not traced have no overhead, because
torch.distributed is wrapped only during traced steps. A blocking collective is recorded as a span of the calling
thread. An asynchronous collective is recorded as in flight from its launch until `wait` returns, although the
collective may end earlier. The call of `wait` is recorded as a span of the waiting thread.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.parallel_state import JOINT_AXES, LANES, SINGLE_AXES, ParallelState
from megatron.training.foreign import replaced

MAIN_TRACK = "training thread"

P = ParamSpec("P")
T = TypeVar("T")

Batch = Callable[[list[dist.P2POp]], list[dist.Work]]
Wait = Callable[Concatenate[dist.Work, P], bool]


class Span(NamedTuple):
    """A timed interval. Times are in nanoseconds, on the clock of `time.perf_counter_ns`, which all processes of a host
    share."""

    track: str
    name: str
    category: str
    start: int
    stop: int
    args: Mapping[str, object]


class Recorder:
    """Collector of a rank's spans. Apart from the constructor, only `take` waits for the device.

    Spans of one thread are nested or disjoint. `in_flight` contains the spans of asynchronous collectives, which may
    overlap. On CUDA, each span of a thread also has a device span, which is timed with two events in the current
    stream.
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

    def span(self, name: str, category: str, args: Mapping[str, object] | None = None) -> _OpenSpan:
        """Return a context manager that records the time of its block."""
        return _OpenSpan(self, name, category, args or {})

    def track(self) -> str:
        """Return the name of the track that shows the spans of the calling thread."""
        thread = threading.get_ident()
        if thread not in self._tracks:
            self._tracks[thread] = f"thread {len(self._tracks)}"
        return self._tracks[thread]

    def event(self) -> torch.cuda.Event | None:
        """Record an event in the current stream and return it; return None on CPUs."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, span: Span, start: torch.cuda.Event | None = None, stop: torch.cuda.Event | None = None) -> None:
        """Add a span of the calling thread. The events `start` and `stop` enclose the work that the span launched on
        the device."""
        self.spans.append(span)
        if start is not None and stop is not None:
            self._events.append((span, start, stop))

    def take(self) -> list[Span]:
        """Return the spans of all threads and, on CUDA, the device spans. This method waits for the device."""
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
    """Context manager that records its block as a span."""

    __slots__ = ("args", "category", "event", "name", "recorder", "start")

    def __init__(self, recorder: Recorder, name: str, category: str, args: Mapping[str, object]) -> None:
        self.recorder = recorder
        self.name = name
        self.category = category
        self.args = args

    def __enter__(self) -> None:
        self.event = self.recorder.event()
        self.start = time.perf_counter_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stop, recorder = time.perf_counter_ns(), self.recorder
        span = Span(recorder.track(), self.name, self.category, self.start, stop, self.args)
        recorder.add(span, self.event, recorder.event())


COLLECTIVES = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "all_gather_single": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "broadcast": "broadcast",
}
MESSAGES = {"isend": "send", "irecv": "receive"}

DATA_AXES = ("dp", "dp_cp", "dp_cp_shard", "dp_cp_copies", "expt_dp", "expt_dp_shard", "expt_dp_copies")
LAYER_AXES = (*(axis for axis in SINGLE_AXES if axis not in DATA_AXES), *LANES)
AXES_OF_MODULES = {
    ".moe.": ("ep", "expt_tp", "expt_tp_ep"),
    ".attention.": ("cp",),
    ".tensor_parallel.": ("tp",),
    ".distributed.": DATA_AXES,
    ".optimizer.": DATA_AXES,
}
"""Maps a part of a module name to mesh axes. Python modules whose name contains this part communicate over these axes.
If several axes consist of the same ranks, the name of the module that calls a collective determines the axis of the
collective."""

PURPOSES = {
    "start_grad_sync": "gradient reduction",
    "start_copies_sync": "gradient reduction",
    "all_reduce_flat_": "gradient reduction",
    "global_token_count": "token count",
    "start_param_sync": "parameter gather",
    "start_gather": "parameter gather",
    "gather_params_": "parameter gather",
}


class CollectiveTaps:
    """Wrappers around the torch.distributed functions that training calls, and around the waits for launched
    collectives."""

    def __init__(self, recorder: Recorder, state: ParallelState) -> None:
        self.recorder = recorder
        self._axes: dict[int, list[str]] = {}
        order = (*LAYER_AXES, *DATA_AXES, *JOINT_AXES, *state.axes)
        for name in dict.fromkeys(order):
            if (group := state.axis(name).group) is not None:
                self._axes.setdefault(id(group), []).append("pp" if name in LANES else name)
        self._launched: dict[int, tuple[dist.Work, Span]] = {}
        """Collectives that have been launched but not waited for, keyed by the id of the work object."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record collectives and messages until the end of the block."""
        there = {name: label for name, label in (COLLECTIVES | MESSAGES).items() if hasattr(dist, name)}
        taps = {name: self._collective(getattr(dist, name), label) for name, label in there.items()}
        with replaced(
            *((dist, name, tap) for name, tap in taps.items()),
            # P2POp compares its operation with isend and irecv of distributed_c10d, so replace these functions as well
            *((distributed_c10d, name, taps[name]) for name in MESSAGES),
            (dist, "batch_isend_irecv", self._batch(dist.batch_isend_irecv)),
            (dist.Work, "wait", self._wait(dist.Work.wait)),
        ):
            yield
        self._launched.clear()

    def _collective(self, function: Callable[P, T], label: str) -> Callable[P, T]:
        @functools.wraps(function)
        def tap(*args: P.args, **kwargs: P.kwargs) -> T:
            name, facts = self._describe(label, args, kwargs)
            recorder = self.recorder
            start_event = self.recorder.event()
            start = time.perf_counter_ns()
            result = function(*args, **kwargs)
            span = Span(recorder.track(), name, "communication", start, time.perf_counter_ns(), facts)
            if isinstance(result, dist.Work):
                self._launched[id(result)] = result, span
            else:
                recorder.add(span, start_event, recorder.event())
            return result

        return tap

    def _batch(self, function: Batch) -> Batch:
        @functools.wraps(function)
        def tap(operations: list[dist.P2POp]) -> list[dist.Work]:
            tensors, group = [op.tensor for op in operations], operations[0].group
            name, facts = self._describe("ring exchange", tensors, {"group": group})
            start = time.perf_counter_ns()
            works = function(operations)
            span = Span(self.recorder.track(), name, "communication", start, start, facts)
            for work in works:  # NCCL returns one work object for all messages
                self._launched.setdefault(id(work), (work, span))
            return works

        return tap

    def _wait(self, function: Wait[P]) -> Wait[P]:
        @functools.wraps(function)
        def tap(work: dist.Work, *args: P.args, **kwargs: P.kwargs) -> bool:
            if id(work) not in self._launched:
                return function(work, *args, **kwargs)
            (_, launched), recorder = self._launched.pop(id(work)), self.recorder
            event, start = recorder.event(), time.perf_counter_ns()
            try:
                return function(work, *args, **kwargs)
            finally:
                stop, track = time.perf_counter_ns(), recorder.track()
                waited = Span(track, f"wait for {launched.name}", "wait", start, stop, launched.args)
                recorder.add(waited, event, recorder.event())
                recorder.in_flight.append(launched._replace(track=track, stop=stop))

        return tap

    def _describe(self, label: str, args: Iterable[object], kwargs: Mapping[str, Any]) -> tuple[str, dict[str, object]]:
        """Return the name of a call, such as "all-reduce dp: gradient reduction", and a dict of its properties, such as
        the axis and the number of bytes."""
        group = kwargs.get("group")
        module, function = caller(sys._getframe(2))
        axes = self._axes.get(id(group), ["world"])
        axis = axis_of(axes, module)
        purpose = PURPOSES.get(function, "")
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        facts: dict[str, object] = {"axis": axis, "caller": f"{module.removeprefix('megatron.')}.{function}"}
        if tensors:
            facts["bytes"] = max(x.numel() * x.element_size() for x in tensors)
        if group is not None:
            facts["ranks"] = dist.get_world_size(group)
        if "tag" in kwargs:
            facts["tag"] = kwargs["tag"]
        return f"{label} {axis}" + (f": {purpose}" if purpose else ""), facts


def axis_of(axes: Sequence[str], module: str) -> str:
    """Return the name of the mesh axis of a collective. `axes` contains the axes that use the collective's process
    group, and the module that called the collective determines which of these axes is returned. If autograd called the
    collective, this module is unknown. The name then consists of all `axes` that a layer may use, such as "cp/ep".
    """
    for part, preferred in AXES_OF_MODULES.items():
        if part in module:
            return next((axis for axis in axes if axis in preferred), axes[0])
    return "/".join(axis for axis in axes if axis in ("tp", "cp", "ep", "pp")) or axes[0]


def caller(frame: FrameType | None) -> tuple[str, str]:
    """Return the names of the module and the function of this program that called a collective. Return ("autograd", "")
    if autograd called the collective."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megatron.") and module not in (__name__, "megatron.core.collectives"):
            return module, frame.f_code.co_name
        frame = frame.f_back
    return "autograd", ""
