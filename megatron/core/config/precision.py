"""Number formats: fields that `ModelParallelConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats of parameters, activations and matrix products."""

    fp16: bool = False
    """Parameters and activations in IEEE half precision, with dynamic loss scaling."""

    bf16: bool = False
    """Parameters and activations in bfloat16."""

    fp32: bool = False
    """Parameters and activations in single precision; the default."""

    fp64: bool = False
    """Parameters and activations in double precision, for tests."""

    fp8_format: str | None = flag(None, choices=("e4m3", "hybrid"))
    """Compute the matrix products of linear layers in 8-bit floating point: all in e4m3, or output gradients in e5m2
    (hybrid). Attention, embedding, head and the weight gradients of experts stay in bf16."""

    fp8_recipe: str = flag("delayed", choices=("tensorwise", "delayed", "rowwise", "blockwise"))
    """Scaling of fp8 tensors: by the tensor's largest value, that of earlier steps (delayed), each row's, or that of
    each tile of 128 values and each block of 128 x 128 weights (blockwise)."""

    fp8_margin: int = flag(0, at_least=0, at_most=16, bounds_reason="as e4m3 has 18 powers of two")
    """Delayed scaling: margin below the format's largest number, in powers of two."""

    fp8_amax_history_len: int = 1
    """Delayed scaling: number of steps in the history of largest values."""

    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"))
    """Delayed scaling: scale by the largest value of the last step, or of the whole history."""

    first_last_layers_bf16: bool = False
    """Keep the first and last transformer layers in bf16."""

    num_layers_at_start_in_bf16: int = flag(1, at_least=0)
    """--first-last-layers-bf16: number of first layers in bf16."""

    num_layers_at_end_in_bf16: int = flag(1, at_least=0)
    """--first-last-layers-bf16: number of last layers in bf16."""

    @property
    def params_dtype(self) -> str:
        """Name of the torch dtype of parameters and activations."""
        for name, chosen in (("float16", self.fp16), ("bfloat16", self.bf16), ("float64", self.fp64)):
            if chosen:
                return name
        return "float32"

    @property
    def main_dtype(self) -> str:
        """Name of the torch dtype of gradients, main parameters and optimizer moments."""
        return "float64" if self.fp64 else "float32"

    def fp8_layers(self, num_layers: int) -> range:
        """Numbers of the transformer layers whose linear layers use fp8."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)
