"""Builds the fp8 GEMMs of linear layers by recipe."""

from __future__ import annotations

import torch

from megatron.core.fp8.blockwise import BlockwiseGemms
from megatron.core.fp8.recipes import DelayedGemms, Fp8Context, RowwiseGemms, TensorwiseGemms
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.linear_gemms import PLAIN, Cuts, LinearGemms

RECIPES: dict[str, type[TensorwiseGemms | DelayedGemms | RowwiseGemms | BlockwiseGemms]] = {
    "tensorwise": TensorwiseGemms,
    "delayed": DelayedGemms,
    "rowwise": RowwiseGemms,
    "blockwise": BlockwiseGemms,
}


def build_gemms(
    name: str, fp8: Fp8Context | None, tp: Axis, cuts: Cuts, device: torch.device, compiled: bool
) -> LinearGemms:
    """Builds the GEMMs of the linear layer `name`: in fp8 with an fp8 context, else in the parameters' precision."""
    if fp8 is None:
        return PLAIN
    return RECIPES[fp8.config.fp8_recipe](name, fp8, tp, cuts, device, compiled)
