"""Number formats: fields that `ModelParallelConfig` inherits. No torch."""

from __future__ import annotations

from dataclasses import dataclass


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
