"""Registry of number formats, such as fp8, in which linear layers compute their GEMMs instead of in the dtype of the
parameters. This module does not import torch.

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
    """Predicate that decides whether the configuration selects the format."""

    layers: Callable[[ModelParallelConfig, int], range]
    """Function that takes the configuration and the number of layers in the model, and returns the numbers of the
    layers whose linear layers use the format."""

    alignment: Callable[[ModelParallelConfig, int], tuple[int, str]]
    """Function of the configuration and the number of ranks that shard the features. `alignment` returns the number by
    which the features on a rank must be divisible, and the flag that requires this."""

    tokens: int
    """Number by which the tokens in a micro-batch must be divisible, so that every kernel supports them."""

    described: Callable[[ModelParallelConfig], str]
    """Function that returns a short description of the format."""

    peak_tflops: Mapping[str, float]
    """Peak TFLOP/s according to the data sheet, keyed by a substring of the GPU's name."""

    gathers: Callable[[ModelParallelConfig], bool] = lambda parallel: False
    """Predicate that returns True if data-parallel ranks gather the weights of linear layers in this format. If the
    predicate returns True, the weights of linear layers have separate buffers."""


class ParamGather(Protocol):
    """Object that casts weights of linear layers before they are gathered.

    The object chooses the buckets that are gathered in the number format, and calls `Bucket.gather_bytes` of each of
    them.
    """

    def cast_(self) -> None:
        """Cast this rank's shards of the weights to the number format, before the weights are gathered."""


class FormatOfProducts(Protocol):
    """Interface of number formats. A number format creates the objects that run the GEMMs and gather the weights."""

    def build(self, config: ModelParallelConfig, layers: range, casts: WeightCasts) -> LinearFormat:
        """Return the `LinearFormat` for the layers whose numbers are in `layers`."""

    def check(self, config: ModelParallelConfig, device: torch.device) -> None:
        """Raise ValueError if the device does not support the number format."""

    def gather(self, ddp: object) -> ParamGather | None:
        """Return the object that casts the weights of `ddp`, a `DistributedDataParallel`, before they are gathered in
        this format. Return None if weights are gathered in the dtype of the parameters."""


LINEAR_FORMATS = Registry("format of products", LinearFormatFacts, protocol=FormatOfProducts)
"""Registered implementations of `FormatOfProducts`, by name. The core registers no number format itself; extensions
do."""


def linear_format(parallel: ModelParallelConfig) -> str | None:
    """Return the name of the number format that the configuration selects for linear layers. Return None if linear
    layers use the dtype of the parameters."""
    return LINEAR_FORMATS.chosen(parallel)


def gathered_format(parallel: ModelParallelConfig) -> str | None:
    """Return the name of the number format in which weights are gathered. Return None if weights are gathered in the
    dtype of the parameters."""
    name = linear_format(parallel)
    return name if name is not None and LINEAR_FORMATS.facts(name).gathers(parallel) else None


def build_format(config: ModelParallelConfig, layers: int, modules: int, casts: WeightCasts) -> LinearFormat | None:
    """Build the number format that a configuration selects; None if all layers use the parameters' format.

    Multi-token prediction modules use the number format if the last layer of the model uses it.

    Args:
        config: Parallelism settings.
        layers: Number of layers of the model.
        modules: Number of multi-token prediction modules, which are numbered after the layers.
        casts: Cache of weights cast to the number format.
    """
    name = linear_format(config)
    used = range(0) if name is None else LINEAR_FORMATS.facts(name).layers(config, layers)
    if name is None or not used:
        return None
    if layers - 1 in used:
        used = range(used.start, layers + modules)
    return LINEAR_FORMATS[name].build(config, used, casts)
