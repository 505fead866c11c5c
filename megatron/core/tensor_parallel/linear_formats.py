"""Number formats of the products of linear layers, beside that of the parameters. This module does not import torch.

LINEAR_FORMATS.register("my_format", "my_package.my_format:MyFormat", when=..., layers=..., ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.registry import Registry

if TYPE_CHECKING:
    import torch

    from megatron.core.tensor_parallel.linear_gemms import LinearFormat, WeightCasts


@dataclass(frozen=True)
class LinearFormatFacts:
    """Facts about a format of products."""

    when: Callable[[ModelParallelConfig], bool]
    """True if the configuration selects the format."""

    layers: Callable[[ModelParallelConfig, int], range]
    """(config, layers of the model) -> numbers of those whose linear layers use it."""

    alignment: Callable[[ModelParallelConfig, int], tuple[int, str]]
    """(config, ranks) -> number that divides a rank's features if `ranks` have a part of them, and the flag that asks
    for it."""

    tokens: int
    """Number that divides the tokens of a micro-batch for every kernel."""

    described: Callable[[ModelParallelConfig], str]
    """The format in a few words."""

    peak_tflops: Mapping[str, float]
    """Part of the name of a GPU -> peak of its data sheet."""

    gathers: Callable[[ModelParallelConfig], bool] = lambda parallel: False
    """True if data-parallel ranks gather weights of linear layers in this format. They then have buffers of their own.
    """


class ParamGather(Protocol):
    """Casts weights of linear layers before they are gathered. The gather processes the buckets that it supports
    (`Bucket.gather_bytes`)."""

    def cast_(self) -> None:
        """Casts this rank's shards, before the gathers start."""


class FormatOfProducts(Protocol):
    """Makes what computes in a format."""

    def build(self, config: ModelParallelConfig, layers: range, casts: WeightCasts) -> LinearFormat:
        """Returns the format of these layers of a model."""

    def check(self, config: ModelParallelConfig, device: torch.device) -> None:
        """Raises ValueError if the device cannot compute it."""

    def gather(self, ddp: object) -> ParamGather | None:
        """Returns the gather of weights in it, given the `DistributedDataParallel` of a rank; None for their own
        format."""


LINEAR_FORMATS = Registry("format of products", LinearFormatFacts, protocol=FormatOfProducts)
"""Name -> `FormatOfProducts`; none of the trunk's."""


def linear_format(parallel: ModelParallelConfig) -> str | None:
    """The number format of linear layers that a configuration selects; None for the format of the parameters."""
    return LINEAR_FORMATS.chosen(parallel)


def gathered_format(parallel: ModelParallelConfig) -> str | None:
    """The number format in which a configuration gathers weights; None for the format of the parameters."""
    name = linear_format(parallel)
    return name if name is not None and LINEAR_FORMATS.facts(name).gathers(parallel) else None


def build_format(config: ModelParallelConfig, layers: int, modules: int, casts: WeightCasts) -> LinearFormat | None:
    """The number format that a configuration selects; None for the format of the parameters in all `layers`. The
    `modules` of multi-token prediction, whose numbers follow those of layers, use it if the last layer does."""
    name = linear_format(config)
    used = range(0) if name is None else LINEAR_FORMATS.facts(name).layers(config, layers)
    if name is None or not used:
        return None
    if layers - 1 in used:
        used = range(used.start, layers + modules)
    return LINEAR_FORMATS[name].build(config, used, casts)
