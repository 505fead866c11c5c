"""Records collectives and messages while a step is traced, by wrapping torch.distributed for that time.

Nothing is wrapped outside of traced steps, so that those cost nothing. A collective that blocks is a span of its
thread. One that is launched is in flight until the wait for it has returned, and that wait is a span of its thread; the
collective may have ended earlier.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.core.parallel_state import JOINT_AXES, LANES, SINGLE_AXES, ParallelState
from megatron.extensions.diagnosis.trace.recorder import Recorder, Span

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
"""Part of a module's name -> the axes that it means, where others have the same ranks."""

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
    """Wraps the functions of torch.distributed that training calls, and the wait for what they launch."""

    def __init__(self, recorder: Recorder, state: ParallelState) -> None:
        self.recorder = recorder
        self._axes: dict[int, list[str]] = {}
        order = (*LAYER_AXES, *DATA_AXES, *JOINT_AXES, *state.axes)
        for name in dict.fromkeys(order):
            if (group := state.axis(name).group) is not None:
                self._axes.setdefault(id(group), []).append("pp" if name in LANES else name)
        self._launched: dict[int, tuple[dist.Work, Span]] = {}
        """Collectives whose wait has not returned yet, by the identity of their work."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Records until the end of the block."""
        with ExitStack() as stack:
            for name, label in COLLECTIVES.items():
                if hasattr(dist, name):
                    stack.enter_context(patch.object(dist, name, self._collective(getattr(dist, name), label)))
            for name, label in MESSAGES.items():
                tap = self._collective(getattr(dist, name), label)
                stack.enter_context(patch.object(dist, name, tap))
                stack.enter_context(patch.object(distributed_c10d, name, tap))  # P2POp compares with it
            stack.enter_context(patch.object(dist, "batch_isend_irecv", self._batch(dist.batch_isend_irecv)))
            stack.enter_context(patch.object(dist.Work, "wait", self._wait(dist.Work.wait)))
            yield
        self._launched.clear()

    def _collective(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def tap(*args: Any, **kwargs: Any) -> Any:
            name, facts = self._describe(label, args, kwargs)
            recorder, start_event, start = self.recorder, self.recorder.event(), time.perf_counter_ns()
            result = function(*args, **kwargs)
            span = Span(recorder.track(), name, "communication", start, time.perf_counter_ns(), facts)
            if isinstance(result, dist.Work):
                self._launched[id(result)] = result, span
            else:
                recorder.add(span, start_event, recorder.event())
            return result

        return tap

    def _batch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def tap(operations: list[Any]) -> Any:
            tensors, group = [op.tensor for op in operations], operations[0].group
            name, facts = self._describe("ring exchange", tensors, {"group": group})
            start = time.perf_counter_ns()
            works = function(operations)
            span = Span(self.recorder.track(), name, "communication", start, start, facts)
            for work in works:  # NCCL has one for all of them
                self._launched.setdefault(id(work), (work, span))
            return works

        return tap

    def _wait(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def tap(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
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

    def _describe(self, label: str, args: Any, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The name of a call, as "all-reduce dp: gradient reduction", and what else is known of it."""
        group = kwargs.get("group")
        module, function = caller(sys._getframe(2))
        axes = self._axes.get(id(group), ["world"])
        axis = axis_of(axes, module)
        purpose = PURPOSES.get(function, "")
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        facts: dict[str, Any] = {"axis": axis, "caller": f"{module.removeprefix('megatron.')}.{function}"}
        if tensors:
            facts["bytes"] = max(x.numel() * x.element_size() for x in tensors)
        if group is not None:
            facts["ranks"] = dist.get_world_size(group)
        if "tag" in kwargs:
            facts["tag"] = kwargs["tag"]
        return f"{label} {axis}" + (f": {purpose}" if purpose else ""), facts


def axis_of(axes: Sequence[str], module: str) -> str:
    """Which of the axes that share a group is meant, by the module that asks. Autograd's passes do not tell: then all
    that a layer may mean, as "cp/ep"."""
    for part, preferred in AXES_OF_MODULES.items():
        if part in module:
            return next((axis for axis in axes if axis in preferred), axes[0])
    return "/".join(axis for axis in axes if axis in ("tp", "cp", "ep", "pp")) or axes[0]


def caller(frame: FrameType | None) -> tuple[str, str]:
    """(module, function) of the library that asked for a collective; of autograd's, the pass that is being run."""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("megatron.") and module not in (__name__, "megatron.core.collectives"):
            return module, frame.f_code.co_name
        frame = frame.f_back
    return "autograd", ""
