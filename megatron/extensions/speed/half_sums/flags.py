"""Register the flag that sets the precision of partial sums in bf16 GEMMs. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("half sums", may_change=True)
@dataclass(frozen=True)
class HalfSumsFlags:
    disable_bf16_reduced_precision_matmul: bool = False
    """Add the partial sums of a bf16 GEMM in fp32 on GPUs. By default, cuBLAS may split the inner dimension and add
    the partial sums in bf16. CPUs always add the partial sums in fp32."""


def _when(config: RunConfig) -> bool:
    return config.options(HalfSumsFlags).disable_bf16_reduced_precision_matmul


CALLBACKS.register("half sums", f"{__package__}.hooks:SumsInFp32", when=_when)
