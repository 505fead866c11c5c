"""Registry of number formats for the GEMMs of linear layers, such as fp8. A number format replaces the dtype of the
parameters in these GEMMs. This module does not import torch.

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
    """Properties of a number format for GEMMs."""

    when: Callable[[ModelParallelConfig], bool]
    """Predicate that returns True if the configuration selects the format."""

    layers: Callable[[ModelParallelConfig, int], range]
    """Function that takes the configuration and the number of transformer layers in the model, and returns the numbers
    of the transformer layers whose linear layers use the format."""

    alignment: Callable[[ModelParallelConfig, int], tuple[int, str]]
    """Function that takes the configuration and the number of ranks over which features are sharded, and returns a pair
    (divisor, flag). The number of features on each rank must be a multiple of the divisor. Error messages name the flag
    as the reason for this requirement."""

    tokens: int
    """Number that must divide the number of tokens in a micro-batch. The kernels of the format require this
    divisibility."""

    described: Callable[[ModelParallelConfig], str]
    """Function that takes the configuration and returns a short description of the format."""

    peak_tflops: Mapping[str, float]
    """Peak TFLOP/s according to the data sheet, keyed by a substring of the GPU's name."""

    gathers: Callable[[ModelParallelConfig], bool] = lambda parallel: False
    """Predicate that returns True if data-parallel ranks gather the weights of linear layers in this format. In this
    case, these weights are in separate buffers."""


class ParamGather(Protocol):
    """Object that casts the weights of linear layers to a number format before they are gathered.

    The object selects the buckets that are gathered in the number format, and calls `Bucket.gather_bytes` for each
    selected bucket.
    """

    def cast_(self) -> None:
        """Cast this rank's shards of the weights to the number format. This method is called before the weights are
        gathered."""


class FormatOfProducts(Protocol):
    """Interface of number formats. A number format creates the objects that run GEMMs, and the object that casts
    weights before they are gathered."""

    def build(self, config: ModelParallelConfig, layers: range, casts: WeightCasts) -> LinearFormat:
        """Return the `LinearFormat` for the layers whose numbers are in `layers`."""

    def check(self, config: ModelParallelConfig, device: torch.device) -> None:
        """Raise ValueError if the device does not support the number format."""

    def gather(self, ddp: object) -> ParamGather | None:
        """Return the object that casts weights before they are gathered in this format, or None if weights are gathered
        in the dtype of the parameters. `ddp` is the `DistributedDataParallel` that holds the weights."""


LINEAR_FORMATS = Registry("format of products", LinearFormatFacts, protocol=FormatOfProducts)
"""Registered implementations of `FormatOfProducts`, keyed by name. All number formats are registered by extensions."""


def linear_format(parallel: ModelParallelConfig) -> str | None:
    """Return the name of the number format that the configuration selects for linear layers, or None if they use the
    dtype of the parameters."""
    return LINEAR_FORMATS.chosen(parallel)


def gathered_format(parallel: ModelParallelConfig) -> str | None:
    """Return the name of the number format in which weights are gathered, or None if they are gathered in the dtype of
    the parameters."""
    name = linear_format(parallel)
    return name if name is not None and LINEAR_FORMATS.facts(name).gathers(parallel) else None


def build_format(config: ModelParallelConfig, layers: int, modules: int, casts: WeightCasts) -> LinearFormat | None:
    """Build the number format that a configuration selects. Return None if all layers use the dtype of the parameters.

    Multi-token prediction modules use the number format if the last layer of the model uses it.

    Args:
        config: Parallelism settings.
        layers: Number of layers of the model.
        modules: Number of multi-token prediction modules, which are numbered after the layers.
        casts: Cache of weights that have been cast to the number format.
    """
    name = linear_format(config)
    used = range(0) if name is None else LINEAR_FORMATS.facts(name).layers(config, layers)
    if name is None or not used:
        return None
    if layers - 1 in used:
        used = range(used.start, layers + modules)
    return LINEAR_FORMATS[name].build(config, used, casts)
