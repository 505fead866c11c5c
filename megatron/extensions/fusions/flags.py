"""The flag of fusions, and what they take the place of. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.config.flag_spec import Section
from megatron.core.parts import ATTENTION_BACKENDS, ATTENTIONS, KERNELS, LAYERS, NORMALIZATIONS, OPTIMIZERS
from megatron.core.transformer.parameters import has_even_heads
from megatron.training.extensions import extension_flags
from megatron.training.hooks import CALLBACKS

_HERE = "megatron.extensions.fusions"


@extension_flags("fusions", may_change=True, rules=f"{_HERE}.rules:rules")
@dataclass(frozen=True)
class Fusions:
    fusions: bool = True
    """Use fused layers and kernels where regions are compiled, as on GPUs (see --compile). Each kernel is compared with
    plain torch at start; one that is wrong, fails or is slower is left out. --no-fusions uses none."""


def fuses(config: Section, ctx: Any) -> bool:
    """Whether a part with this configuration and context is built in its fused form."""
    return bool(ctx.compiled) and config.options(Fusions).fusions


def splits_at_once(config: Any, ctx: Any) -> bool:
    """Whether self-attention gains by splitting its projection at once: where it rotates or sums up the gradient of a
    bias, and no norm comes between."""
    rotates = config.layer(ctx.layer).rotation is not None
    sums_bias = ctx.compiled and (config.add_bias_linear or config.add_qkv_bias)
    normed = config.qk_layernorm or (config.qk_l2_norm and rotates)
    return (rotates or sums_bias) and not normed and has_even_heads(config)


ATTENTIONS.substitute(
    "self_attention",
    f"{_HERE}.split_heads:SplitSelfAttention",
    when=lambda name, config, ctx: splits_at_once(config, ctx),
)
LAYERS.substitute(
    "transformer_layer",
    f"{_HERE}.layer:FusedTransformerLayer",
    when=lambda name, config, ctx: fuses(config, ctx),
)
for _norm in ("LayerNorm", "RMSNorm"):
    NORMALIZATIONS.substitute(
        _norm,
        f"{_HERE}.fused_norm:Fused{_norm}",
        when=lambda name, size, config, ctx, partial_over: fuses(config, ctx),
    )
OPTIMIZERS.substitute(
    "adam",
    f"{_HERE}.compiled_adam:CompiledAdamW",
    when=lambda config, shards: bool(shards) and all(shard.main.itemsize == 4 for shard in shards),
)
for _operation, _kernel in {
    "loss_and_gradient_": "cross_entropy:LOSS",
    "scale_rows_": "cross_entropy:SCALE",
    "add_products_grouped_": "grouped_products:ADD_PRODUCTS",
    "clear_rows_behind_": "grouped_products:CLEAR_ROWS",
    "cast_transpose": "cast_transpose:CAST_BY_AMAX",
    "cast_transpose_noting_amax": "cast_transpose:CAST_NOTING",
    "amax_of_rows_and_columns": "cast_transpose:AMAX",
    "transpose": "cast_transpose:TRANSPOSE",
    "norm_cast": "norms:NORM_CAST",
    "norm_gradients": "norms:NORM_GRADIENTS",
    "swiglu_cast": "fused_casts:SWIGLU_CAST",
    "swiglu_gradient_cast": "fused_casts:SWIGLU_GRADIENT_CAST",
    "heads_gradient_cast": "fused_casts:HEADS_CAST",
}.items():
    KERNELS.register(_operation, f"{_HERE}.kernels.{_kernel}")
KERNELS.register("add_fp8_product_", f"{_HERE}.gemm_choice:WEIGHT_GRADS")
KERNELS.register("residual_gemm", f"{_HERE}.gemm_choice:RESIDUAL_GEMM")
KERNELS.register("mlp", f"{_HERE}.fused_mlp:MLP_KERNEL")

for _backend in ("flash3", "cudnn", "triton"):
    ATTENTION_BACKENDS.register(_backend, f"{_HERE}.attention.backends:{_backend.title()}Backend")

CALLBACKS.register(
    "kernel choice",
    f"{_HERE}.hooks:KernelChoice",
    when=lambda config: not (config.parallel.cpu and config.options(Fusions).fusions),
)
