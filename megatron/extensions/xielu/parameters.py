"""The parameters of xIELU. No torch."""

from __future__ import annotations

from math import expm1, log

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import Init, ParamMeta

BETA = 0.5
"""Its slope at zero."""


def scalars(name: str, config: TransformerConfig) -> list[ParamMeta]:
    """Both scalars of the function of this name, which make its factors start at 0.8."""
    inits = {"alpha_p": log(expm1(0.8)), "alpha_n": log(expm1(0.8 - BETA))}
    # A tensor-parallel rank sees a part of the width: its gradient is one term of a sum.
    return [
        ParamMeta(f"{name}.{key}", (1,), {}, Init("constant", value=value), ("tp",)) for key, value in inits.items()
    ]
