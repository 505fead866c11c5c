"""Repeats micro-batches that do what those before them did, instead of running the program for each.

On fake tensors two micro-batches in the middle of a step differ in nothing but their number. The first one, the last
one and two more run. Where these two have made and freed the same memory and called the same collectives, action by
action, the others are counted and recorded as those were. Messages between stages are posted for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.core.pipeline_parallel.actions import Action, Kind
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.extensions.planner.rehearsal.rank_mode import RankMode
from megatron.extensions.planner.rehearsal.record import Collective

COMPARED = (1, 2)
"""Micro-batches whose actions are compared."""

OPERANDS = frozenset({"hidden", "grad"})
"""What a stage has been given: births of the storages of messages that have arrived."""

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype]


class Unlike(BaseException):
    """Micro-batches differ after some have been repeated: the rank must be rehearsed with all of them. No `Exception`,
    which the program might handle."""


class _Place:
    """Stands for the place of a repeated output in the autograd graph. Keeps what its weight gradients will read."""

    kept: tuple[Tensor, ...] = ()


@dataclass
class _Trace:
    """What one action did to memory, and its collectives."""

    base: int
    high: int | None = None
    """The most bytes beyond those at its start that were noted."""

    events: list[Hashable] = field(default_factory=list)
    made: dict[Hashable, tuple[int, str]] = field(default_factory=dict)
    """Size and call site of the storages that it made, by birth: (kind, number)."""

    freed: list[Hashable] = field(default_factory=list)
    """Births, of this action or of earlier ones of the micro-batch."""

    collectives: list[Collective] = field(default_factory=list)
    output: Layout | None = None
    site: str = ""
    """Where the output was made."""

    trained: bool = True

    def same(self, other: _Trace) -> bool:
        mine, others = (
            (trace.high, trace.events, trace.collectives, trace.output, trace.site, trace.trained)
            for trace in (self, other)
        )
        return mine == others


class RepeatedMicrobatches:
    """Takes the place of what an executor computes in micro-batches 3 to `microbatches` - 2, from 0."""

    def __init__(self, mode: RankMode, executor: PipelineExecutor, microbatches: int) -> None:
        self.mode, self.log, self.last = mode, mode.log, microbatches - 1
        self.repeated = 0
        """Actions that were repeated."""
        self._off = False
        self._unclear = False
        """Whether something was made or freed that is no part of one micro-batch."""
        self._open: tuple[Action, _Trace] | None = None
        self._behind: tuple[Action, _Trace] | None = None  # the compared action that was the last to compute
        self._births: dict[int, tuple[int, int, Hashable]] = {}  # by storage: stage, micro-batch, birth
        self._traces: dict[tuple[Kind, int, int], _Trace] = {}  # by kind, stage, micro-batch
        self._held: dict[tuple[int, int], dict[Hashable, int]] = {}  # of repeated ones: birth -> key in mode.sizes
        self._places: dict[tuple[int, int], _Place] = {}
        self._kept: dict[tuple[int, int], frozenset[Hashable]] = {}  # what a compared one kept for its W
        self._ended: list[Action] = []  # compared backwards whose operands have not been looked for since
        self._next_key = -1
        self._forward, self._backward = executor.compute_forward, executor.compute_backward
        self._weights = executor.compute_weights
        executor.compute_forward = self.forward
        executor.compute_backward = self.backward  # type: ignore[assignment]
        executor.compute_weights = self.weights
        mode.watcher = self

    # What the mode reports.

    def made(self, key: int, size: int, site: str) -> None:
        self._unclear |= key in self._births  # a storage that changes its size
        if self._open is not None:
            action, trace = self._open
            birth = action.kind, len(trace.events)
            self._births[key] = action.stage, action.microbatch, birth
            trace.made[birth] = size, site
            trace.events.append(("made", size, site))

    def gone(self, key: int) -> None:
        stage, microbatch, birth = self._births.pop(key, (-1, -1, None))
        if birth is None:
            self._unclear |= self._open is not None
            return
        # Behind an action goes what the executor has held for it.
        action, trace = self._open or self._behind or (None, None)
        if trace is None or action is None or (stage, microbatch) != action[1:]:
            self._unclear |= birth not in OPERANDS or self._open is not None
            return
        if self._open is not None or birth not in OPERANDS:
            trace.events.append(("freed", birth, self._open is not None))
            if trace.made.pop(birth, None) is None:
                trace.freed.append(birth)

    def resized(self) -> None:
        self._unclear |= self._open is not None

    def noted(self, now: int) -> None:
        if self._open is not None:
            trace = self._open[1]
            trace.high = now - trace.base if trace.high is None else max(trace.high, now - trace.base)

    # What the executor calls.

    def forward(self, action: Action, hidden: Tensor | None) -> tuple[Tensor, Any]:
        self._settle()
        if self._between(action) and (trace := self._alike(action)) is not None:
            output = self._again(action, trace)
            assert output is not None
            if not trace.trained:
                return output, None
            self._places[action[1:]] = place = _Place()
            return output, place
        if not self._compared(action):
            return self._forward(action, hidden)
        if hidden is not None:
            self._births[_key(hidden)] = *action[1:], "hidden"
        message, place = self._traced(action, lambda: self._forward(action, hidden))
        assert message is not None
        return message, place

    def backward(self, action: Action, hidden: Tensor | None, place: Any, grad: Tensor) -> Tensor | None:
        self._settle()
        if isinstance(place, _Place):
            if action.kind is Kind.I:
                kept, other = (self._kept.get((action.stage, number)) for number in COMPARED)
                if kept is None or kept != other:
                    raise Unlike
                operands = ("hidden", hidden), ("grad", grad)
                place.kept = tuple(x for name, x in operands if x is not None and name in kept)
            return self._again(action, self._needed(action))
        if not self._compared(action):
            return self._backward(action, hidden, place, grad)

        def compute() -> tuple[Tensor | None, None]:
            output = self._backward(action, hidden, place, grad)
            if hidden is not None:
                hidden.grad = None  # the message is all that holds it, as in the executor
            return output, None

        self._births[_key(grad)] = *action[1:], "grad"
        message, _ = self._traced(action, compute)
        self._ended.append(action)
        return message

    def weights(self, action: Action) -> None:
        self._settle()
        if (place := self._places.get(action[1:])) is not None:
            self._again(action, self._needed(action))
            self._weights(action)  # none are queued
            place.kept = ()
        elif self._compared(action):
            self._traced(action, lambda: (self._weights(action), None))
        else:
            self._weights(action)

    def finish(self) -> None:
        """At the end of a step. Raises Unlike if what was repeated leaves other memory than what was run."""
        self._settle()
        self.mode.watcher = None
        if self.repeated and (self._births or any(self._held.values())):
            raise Unlike

    # How.

    def _between(self, action: Action) -> bool:
        return not self._off and COMPARED[-1] < action.microbatch < self.last

    def _compared(self, action: Action) -> bool:
        return not self._off and action.microbatch in COMPARED

    def _alike(self, action: Action) -> _Trace | None:
        """What the compared micro-batches did; None, and nothing is repeated, if they differ."""
        one, other = (self._traces.get((action.kind, action.stage, number)) for number in COMPARED)
        if one is None or other is None or not one.same(other):
            self._give_up()
            return None
        return other

    def _needed(self, action: Action) -> _Trace:
        trace = self._alike(action)
        if trace is None:
            raise Unlike
        return trace

    def _give_up(self) -> None:
        if self.repeated:
            raise Unlike
        self._off, self._unclear, self._open = True, False, None
        self._births.clear()

    def _settle(self) -> None:
        """Before an action computes: what compared backwards were given is gone, or kept for their W."""
        if self._unclear:
            self._give_up()
        self._behind = None
        ended, self._ended = self._ended, []
        for kind, stage, microbatch in ended:
            kept = frozenset(birth for *of, birth in self._births.values() if of == [stage, microbatch])
            kept &= OPERANDS
            self._kept[stage, microbatch] = kept
            if kept and kind is Kind.B:
                self._give_up()

    def _traced(self, action: Action, compute: Callable[[], tuple[Any, Any]]) -> tuple[Tensor | None, Any]:
        """Runs a compared action. The message is another tensor than the output, so that it is seen whether anything
        but the message holds the output."""
        trace, first_call = _Trace(self.mode.now), len(self.log.collectives)
        self._open = action, trace
        output, place = compute()
        trace.trained = place is not None
        trace.collectives = [each._replace(phase="", microbatch=-1) for each in self.log.collectives[first_call:]]
        message = output
        if output is not None:
            birth = self._births.get(_key(output), (-1, -1, None))[2]
            size, site = trace.made.get(birth, (-1, ""))
            if size != output.untyped_storage().nbytes() or size < 0:
                self._give_up()  # it lies in the memory of something else
                return output, place
            trace.output, trace.site = (output.shape, output.stride(), output.dtype), site
            self._open = None
            message = self._empty(trace.output, site)
            self._open = action, trace
            del output
            self._unclear |= birth in trace.made  # the graph holds it too
        self._open, self._behind = None, (action, trace)
        self._traces[action.kind, action.stage, action.microbatch] = trace
        return message, place

    def _again(self, action: Action, trace: _Trace) -> Tensor | None:
        """Counts and records an action as that of `trace`. Returns its output."""
        mode, held = self.mode, self._held.setdefault(action[1:], {})
        self.repeated += 1
        if trace.high is not None:
            level = mode.now + trace.high
            if mode.limit is not None and level > mode.limit:
                raise Unlike  # the program itself shall say where
            mode.reach(level)
        phase, microbatch = self.log.phase()
        self.log.collectives += [each._replace(phase=phase, microbatch=microbatch) for each in trace.collectives]
        for birth in trace.freed:
            if birth not in OPERANDS:
                mode.now -= mode.sizes.pop(held.pop(birth))
        for birth, (size, site) in trace.made.items():
            held[birth] = self._next_key
            mode.sizes[self._next_key], mode.sites[self._next_key] = size, site
            mode.now += size
            self._next_key -= 1
        return None if trace.output is None else self._empty(trace.output, trace.site)

    def _empty(self, layout: Layout, site: str) -> Tensor:
        """An empty tensor that counts as one made at `site`, at no moment of a peak."""
        shape, stride, dtype = layout
        mode = self.mode
        inside, mode._inside = mode._inside, True
        made = torch.empty_strided(shape, stride, dtype=dtype)
        mode._inside = inside
        mode.sites[_key(made)] = site
        return made


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata
