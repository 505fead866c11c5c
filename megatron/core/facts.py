"""Facts about parts, known without importing them: the facts that are registered beside them. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class WhenFacts:
    when: Callable[[Any], bool]
    """Section of the configuration -> whether it asks for the part."""


@dataclass(frozen=True)
class LinearFormatFacts:
    """Functions are of the ModelParallelConfig."""

    when: Callable[[Any], bool]
    """Whether it asks for the format."""

    layers: Callable[[Any, int], range]
    """(config, layers of the model) -> numbers of those whose linear layers use it."""

    alignment: Callable[[Any, int], tuple[int, str]]
    """(config, ranks) -> number that divides a rank's features if `ranks` have a part of them, and the flag that asks
    for it."""

    tokens: int
    """Number that divides the tokens of a micro-batch for every kernel."""

    described: Callable[[Any], str]
    """The format in a few words."""

    peak_tflops: Mapping[str, float]
    """Part of the name of a GPU -> peak of its data sheet."""

    gathers: Callable[[Any], bool] = lambda parallel: False
    """Whether data-parallel ranks gather weights of linear layers in this format. They then have buffers of their own.
    """


@dataclass(frozen=True)
class ScheduleFacts:
    chunks: int = 1
    """Stages on a rank, where nobody says how many."""
    any_chunks: bool = False
    """Whether it is called with the number of stages on a rank as a third argument, and takes any."""
    any_groups: bool = False
    """Whether it is called with the number of micro-batches in a group as a fourth argument (None: its own choice)."""
    v_shaped: bool = False
    """Whether stages are placed in a V, so that rank 0 has the first and the last one."""
    splits_backward: bool = False
    """Whether it has I and W, the gradients of inputs and of weights, in place of B."""

    always_legal: bool = False
    """Whether it takes any number of ranks and of micro-batches, so that validation need not build its lists."""

    in_turns: bool = False
    """Whether it takes `in_turns=True`: FB before each F and B, or I, that run in turns
    (`schedules.runs_in_turns`)."""

    of_step: str | None = None
    """Where the lists of a step are that begins the passes of the next one, "module:function": (schedule, p,
    micro-batches of the step before, of the step, of the next one) -> lists, communication included. None: a step ends
    before the next one begins."""

    asks_for: tuple[Any, ...] = ()
    """Options that `config.options` of its runs finds."""

    rules: str | None = None
    """Where its rules are, "module:function": (RunConfig, world size) -> problems of a run that has it."""

    @property
    def flushes(self) -> bool:
        """Whether a step ends before the next one begins."""
        return self.of_step is None

    def form(self) -> str:
        """The arguments of a schedule."""
        wider = ", v" * (self.any_chunks or self.any_groups) + ", group" * self.any_groups
        return f"p, m{wider}{', in_turns=' * self.in_turns}"
