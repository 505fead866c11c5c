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
