"""The registries of all kinds of parts that a run is built of, and the library's own parts in them. No torch.

An extension adds to the same registries: `LAYERS.register("my_layer", MyLayer)`, or as a decorator. The docstring
below each registry explains how its parts are built, and `facts` what a registration states about them. `config` is the
section of the run's configuration that the part belongs to; `config.options(Cls)` are the values of an extension's own
flags."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, TypeVar, cast

from megatron.core import facts
from megatron.core.registry import NoFacts, Registry

LINEARS: Registry[Any, NoFacts, ...] = Registry("linear layer", NoFacts, "linear, ctx")
"""`Linear(linear, ctx)`: a linear layer of transformer layers with sharded features, as a description of
`megatron.core.tensor_parallel.linear_spec` says. A substitute computes and sends the same in another way.
`ctx.options(Cls)` are the values of an extension's own flags."""

LINEARS.register("column_parallel", "megatron.core.tensor_parallel.layers:ColumnParallelLinear")
LINEARS.register("row_parallel", "megatron.core.tensor_parallel.layers:RowParallelLinear")

LINEAR_FORMATS: Registry[Any, facts.LinearFormatFacts, ...] = Registry(
    "format of products", facts.LinearFormatFacts, attributes=("build", "check", "gather")
)
"""Number format of the products of linear layers beside that of the parameters; none of the trunk's. `build(config,
layers, casts)` makes a `megatron.core.tensor_parallel.linear_gemms.LinearFormat`; `check(config, device)` raises
ValueError if the device cannot compute it; `gather(ddp)` makes the
`megatron.core.distributed.distributed_data_parallel.ParamGather` of weights that are gathered in it, or None."""

linear_format = LINEAR_FORMATS.chosen
"""The format of products that a ModelParallelConfig asks for; None for that of the parameters."""


def gathered_format(parallel: Any) -> str | None:
    """The format of products in which a ModelParallelConfig asks for weights to be gathered; None for their own."""
    name = linear_format(parallel)
    return name if name is not None and LINEAR_FORMATS.facts(name).gathers(parallel) else None


STAGE_SPLITS: Registry[Any, facts.WhenFacts, ...] = Registry(
    "split of layers", facts.WhenFacts, attributes=("virtual", "num_stages", "end_costs", "fixed")
)
"""Divides the layers among pipeline stages in another way than evenly; none of the trunk's. `virtual(parallel)`:
whether it makes more stages than ranks; `num_stages(model, parallel)`: how many, or None where it leaves that;
`end_costs(parallel, first, last)`: what embedding and head cost, given their FLOPs, in layers; `fixed(model, parallel,
layout)`: stage -> its number of layers. The last three raise ValueError, which names the flag. `when` is of the
ModelParallelConfig."""

DATASETS: Registry[Any, NoFacts, ...] = Registry("--dataset-type", NoFacts, "config, format, seed, sizes")
"""`build(config, format, seed, sizes)`: the `Datasets` of training, validation and test, `sizes` being the samples
wanted of each (None: one epoch); see `megatron.extensions.data.datasets.generator_dataset.GeneratorDataset`."""

DATASETS.register("gpt", "megatron.core.datasets.build:build_gpt")
DATASETS.register("mock", "megatron.core.datasets.build:build_mock")


class Kernel(Protocol):
    """A kernel that may compute an operation in place of plain torch."""

    def suits(self, *operands: Any) -> bool:
        """Whether it computes with these operands: their device, precision and sizes."""

    def __call__(self, *operands: Any) -> Any: ...


KERNELS: Registry[Kernel, NoFacts, ...] = Registry("kernel", NoFacts, attributes=("suits",))
"""Name of an operation -> the kernel that may compute it. The library itself has none."""

LEFT_OUT: set[str] = set()
"""Kernels that this process does not use: those that are wrong, fail or are slower than torch."""

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel_for(name: str, *operands: Any) -> Kernel | None:
    """The kernel to compute an operation with these operands by; None for plain torch."""
    if name in LEFT_OUT or name not in KERNELS:
        return None
    kernel = _kernel(name)
    return kernel if kernel.suits(*operands) else None


def operation(plain: Function) -> Function:
    """Decorator of a function of plain torch, called by position, which a kernel of its name may compute."""

    @wraps(plain)
    def compute(*operands: Any) -> Any:
        return (kernel_for(plain.__name__, *operands) or plain)(*operands)

    return cast("Function", compute)


@cache
def _kernel(name: str) -> Kernel:
    return KERNELS[name]
