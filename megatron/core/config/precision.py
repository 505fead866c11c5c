"""The numbers that a run computes in: the fields that `ModelParallelConfig` takes over. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag


@dataclass(frozen=True)
class PrecisionConfig:
    """Parameters and activations, and what the matrix products of transformer layers are computed in."""

    fp16: bool = False
    """Parameters and activations in IEEE half precision, with dynamic loss scaling."""

    bf16: bool = False
    """Parameters and activations in bfloat16."""

    fp32: bool = False
    """Parameters and activations in single precision; the default."""

    fp64: bool = False
    """Parameters and activations in double precision, for tests."""

    fp8_format: str | None = flag(None, choices=("e4m3", "hybrid"))
    """Matrix products of the linear layers of transformer layers in 8-bit floating point: all in e4m3, or with
    gradients of outputs in e5m2 (hybrid). Experts, attention, embedding and head keep --bf16."""

    fp8_recipe: str = flag("delayed", choices=("tensorwise", "delayed", "rowwise"))
    """What fp8 scales follow from: a tensor's own largest value, that of steps before, or each row's own."""

    fp8_margin: int = 0
    """Delayed scaling: powers of two that scales leave free below the format's largest number."""

    fp8_amax_history_len: int = 1
    """Delayed scaling: steps of which the largest values are kept."""

    fp8_amax_compute_algo: str = flag("most_recent", choices=("most_recent", "max"))
    """Delayed scaling: scale by the largest value of the last step, or of all that are kept."""

    first_last_layers_bf16: bool = False
    """Keep the first and last transformer layers out of fp8."""

    num_layers_at_start_in_bf16: int = 1
    """First layers that --first-last-layers-bf16 keeps out of fp8."""

    num_layers_at_end_in_bf16: int = 1
    """Last layers that --first-last-layers-bf16 keeps out of fp8."""

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
        """The transformer layers, by number, whose linear layers multiply in fp8."""
        if self.fp8_format is None:
            return range(0)
        if not self.first_last_layers_bf16:
            return range(num_layers)
        return range(self.num_layers_at_start_in_bf16, num_layers - self.num_layers_at_end_in_bf16)
