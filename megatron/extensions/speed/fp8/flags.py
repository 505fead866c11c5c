"""Register the fp8 flags and the import paths of their implementations. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

HERE = "megatron.extensions.speed.fp8"

ALIGNMENT = 16
"""Required divisor of all matrix dimensions in fp8 kernels."""

TILE = 128
"""Number of elements in a tile under --fp8-recipe blockwise, which is also the number of tiles in a block."""


@extension_flags("fp8", may_change=True, rules=f"{HERE}.rules:fp8")
@dataclass(frozen=True)
class Fp8Flags:
    fp8_format: str | None = flag(None, choices=("e4m3", "hybrid"))
    """Compute the matrix products of linear layers in 8-bit floating point. e4m3 uses e4m3 for all operands. hybrid
    uses e5m2 for output gradients, except in experts. Attention (without --attention-backend fp8), the embedding and
    the output layer stay in bf16."""

    fp8_recipe: str = flag("delayed", choices=("tensorwise", "delayed", "rowwise", "blockwise"))
    """How fp8 tensors are scaled: by the largest value of the tensor (tensorwise), of the tensor in earlier steps
    (delayed), of each row (rowwise), or of each tile of 128 values and each block of 128 x 128 weights (blockwise)."""

    fp8_margin: int = flag(0, at_least=0, at_most=16, bounds_reason="because e4m3 has 18 powers of two")
    """Delayed scaling: margin below the largest number of the format, as an exponent of two."""

    fp8_amax_history_len: int = 1
    """Delayed scaling: number of steps in the amax history."""

    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"))
    """Delayed scaling: scale by the largest value of the last step (most_recent) or of the whole history (max)."""

    first_last_layers_bf16: bool = False
    """Keep the first and last transformer layers in bf16."""

    num_layers_at_start_in_bf16: int = flag(1, at_least=0)
    """--first-last-layers-bf16: number of first layers in bf16."""

    num_layers_at_end_in_bf16: int = flag(1, at_least=0)
    """--first-last-layers-bf16: number of last layers in bf16."""

    fp8_param_gather: bool = False
    """Gather the updated weights of fp8 linear layers in fp8 over the data-parallel ranks. The all-gather then
    transfers half as many bytes, and the results stay the same."""

    def layers(self, num_layers: int) -> range:
        """Return the indices of the transformer layers whose linear layers use fp8."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)


def alignment(parallel: ModelParallelConfig, ranks: int) -> tuple[int, str]:
    """Return (alignment, flag). If `ranks` ranks share the features of an fp8 layer, the number of features on each
    rank must be a multiple of the alignment. `flag` names the option that requires this alignment.

    Kernels require multiples of 16. With blockwise scaling, ranks must hold whole tiles, because a tile has one
    scale."""
    cut = parallel.options(Fp8Flags).fp8_recipe == "blockwise" and ranks > 1
    return (TILE, "--fp8-recipe blockwise") if cut else (ALIGNMENT, "--fp8-format")


def described(parallel: ModelParallelConfig) -> str:
    """Return the format and the recipe as text that a plan prints."""
    own = parallel.options(Fp8Flags)
    return f"fp8 {own.fp8_format} {own.fp8_recipe}"


def gathers(parallel: ModelParallelConfig) -> bool:
    """Return True if weights are gathered in fp8. A validation rule rejects --fp8-param-gather with the rowwise
    recipe."""
    own = parallel.options(Fp8Flags)
    return own.fp8_param_gather and own.fp8_format is not None and own.fp8_recipe != "rowwise"


def delays(config: RunConfig) -> bool:
    """Return True if scales are computed from the amax values of earlier steps (--fp8-recipe delayed)."""
    own = config.options(Fp8Flags)
    return own.fp8_format is not None and own.fp8_recipe == "delayed"


LINEAR_FORMATS.register(
    "fp8",
    f"{HERE}.build:Fp8Format",
    when=lambda parallel: parallel.options(Fp8Flags).fp8_format is not None,
    layers=lambda parallel, num_layers: parallel.options(Fp8Flags).layers(num_layers),
    alignment=alignment,
    tokens=TILE,
    described=described,
    gathers=gathers,
    peak_tflops={
        "H100": 1978.9,
        "H200": 1978.9,
        "H800": 1978.9,
        "GH200": 1978.9,
        "B200": 4500.0,
        "L40S": 733.0,
        "GeForce RTX 4090": 330.3,
        "GeForce RTX 5090": 419.0,
    },
)
CALLBACKS.register("fp8 scales", f"{HERE}.recipes:Fp8Scales", when=delays)
