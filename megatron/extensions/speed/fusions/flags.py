"""Register the flag for fusions, the fused layers and the fused kernels. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megatron.core.attention.backends import ATTENTION_BACKENDS
from megatron.core.config.flag_spec import Section
from megatron.core.config.layers import LAYERS
from megatron.core.config.mixers import MIXERS
from megatron.core.config.model import TransformerConfig
from megatron.core.config.norms import NORMALIZATIONS
from megatron.core.kernels import KERNELS
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

_HERE = "megatron.extensions.speed.fusions"

OWN_BACKENDS = "flash3", "cudnn", "triton"
"""Choices of --attention-backend that this extension adds to the choices for torch's kernels."""

FP8_BACKENDS = {"fp8": "Fp8Backend", "fp8_flash3": "Fp8Flash3Backend", "fp8_triton": "Fp8TritonBackend"}
"""Backend classes for the choices of --attention-backend that run the forward pass in fp8. These backends change
results, so they are used only if requested."""


FP8_CHANNELS, WIDEST_FP8 = 16, 256
"""Limits of fp8 attention: head widths must be multiples of FP8_CHANNELS, and at most WIDEST_FP8."""


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Report attention kernels that were requested but have no effect. GPU kernels support only some kinds of attention
    and precisions. Other kernels are used for the remaining kinds and precisions."""
    own = c.options(Fusions)
    m, p = c.model, c.parallel
    backend, cap = p.attention_backend, m.attn_logit_softcapping
    if backend in FP8_BACKENDS:
        yield from _fp8_rules(c)
    if not own.fusions and backend in (*OWN_BACKENDS, *FP8_BACKENDS):
        rule = "has no effect with --no-fusions: torch's kernels compute attention"
        yield Problem("--attention-backend", backend, rule, "remove one of them", harmless=True)
    if backend not in ("flash", *OWN_BACKENDS):
        return
    widths = m.window_size, m.attention_chunk_size
    some_local = any(width is not None and width < m.seq_length for width in widths)
    local = "--window-size" if m.window_size is not None else "--attention-chunk-size"
    cudnn = backend == "cudnn"
    triton = backend == "triton"
    drops = m.attention_dropout > 0
    wide = not (p.bf16 or p.fp16)
    with_dropout = "plain torch" if p.cpu or wide else "the kernel triton"
    for beside, given, why in (
        # torch has a FlashAttention for CPUs that supports all precisions.
        ("--cpu", p.cpu and backend != "flash", "it is a GPU kernel"),
        ("--fp32 or --fp64", wide and not p.cpu, "it computes in 16 bits"),
        (f"--attention-dropout {m.attention_dropout}", drops and not triton, f"{with_dropout} computes dropout"),
        ("--attention-dropout 0", triton and not drops, "other kernels compute attention without dropout"),
        ("--position-embedding-type alibi", m.alibi, "plain torch computes ALiBi"),
        (f"--attn-logit-softcapping {cap}", cap is not None, "plain torch computes capped scores"),
        ("--reset-attention-mask", cudnn and c.data.reset_attention_mask, "FlashAttention computes documents"),
        (
            f"{local} in all layers",
            cudnn and some_local and m.window_attn_skip_freq is None,
            "FlashAttention does that",
        ),
    ):
        if given:
            rule = f"has no effect with {beside}: {why}"
            yield Problem("--attention-backend", backend, rule, "remove one of them", harmless=True)


def _fp8_rules(c: RunConfig) -> Iterator[Problem]:
    """Report kinds of attention that fp8 kernels do not support."""
    m, p = c.model, c.parallel
    in_all = m.window_attn_skip_freq is None
    local = (m.window_size is not None or m.attention_chunk_size is not None) and in_all
    cap, width = m.attn_logit_softcapping, m.head_dim
    for given, beside, remedy in (
        (not (p.bf16 or p.fp16), "32-bit or 64-bit operands", "add --bf16, or use auto"),
        (m.attention_dropout > 0, f"--attention-dropout {m.attention_dropout}", "use --attention-dropout 0, or auto"),
        (m.alibi, "--position-embedding-type alibi", "use auto"),
        (cap is not None, f"--attn-logit-softcapping {cap}", "use auto"),
        (m.softmax_type != "vanilla", f"--softmax-type {m.softmax_type}", "use auto"),
        (p.context_parallel_size > 1, f"--context-parallel-size {p.context_parallel_size}", "use auto"),
        (c.data.reset_attention_mask, "--reset-attention-mask", "use auto"),
        (local, "a window or chunks in all layers", "use auto"),
        (m.value_head_dim != width, f"values of {m.value_head_dim} channels with keys of {width}", "use auto"),
        (
            width % FP8_CHANNELS > 0 or width > WIDEST_FP8,
            f"heads of {width} channels",
            f"use a multiple of {FP8_CHANNELS} up to {WIDEST_FP8} for --kv-channels, or auto",
        ),
        (
            p.attention_backend == "fp8" and c.training.deterministic and not p.cpu,
            "--deterministic-mode, which allows no choice by timings",
            "use fp8_flash3 or fp8_triton",
        ),
    ):
        if given:
            yield Problem("--attention-backend", p.attention_backend, f"does not compute {beside}", remedy)


@extension_flags("fusions", may_change=True, rules=rules, always=True)
@dataclass(frozen=True)
class Fusions:
    fusions: bool = True
    """Use fused layers and kernels whenever regions are compiled (see --compile). At the start of a run, each kernel is
    compared with plain torch. A kernel that is wrong, fails or is slower is not used. --no-fusions turns all kernels
    off."""


class Built(Protocol):
    """Fields of `megatron.core.tensor_parallel.layers.TPContext` that determine whether a module is fused."""

    layer: int

    @property
    def compiled(self) -> bool: ...


def fuses(config: Section, ctx: Built) -> bool:
    """Return True if parts of the model that are built with this configuration and context use fused operations."""
    return ctx.compiled and config.options(Fusions).fusions


def splits_at_once(config: TransformerConfig, ctx: Built) -> bool:
    """Return True if self-attention should split its qkv projection into heads in a single pass. A single pass is
    faster if attention applies a rotation or sums a bias gradient, without a norm or a clamp between the projection and
    the rotation."""
    rotates = config.layer(ctx.layer).rotation is not None
    sums_bias = ctx.compiled and (config.add_bias_linear or config.add_qkv_bias)
    normed = config.qk_layernorm or (config.qk_l2_norm and rotates) or config.clip_qkv is not None
    return (rotates or sums_bias) and not normed and config.has_even_heads


MIXERS.substitute(
    "self_attention",
    f"{_HERE}.split_heads:SplitSelfAttention",
    when=lambda name, config, ctx: splits_at_once(config, ctx),
)
LAYERS.substitute(
    "transformer_layer",
    f"{_HERE}.layer:FusedTransformerLayer",
    when=lambda name, config, ctx: fuses(config, ctx) and config.residual is None,
)
for _norm in ("LayerNorm", "RMSNorm"):
    NORMALIZATIONS.substitute(
        _norm,
        f"{_HERE}.fused_norm:Fused{_norm}",
        when=lambda name, size, config, ctx, partial_over: fuses(config, ctx),
    )
for _operation, _kernel in {
    "loss_and_gradient_": "kernels.cross_entropy:LOSS",
    "scale_rows_": "kernels.cross_entropy:SCALE",
    "cast_transpose": "kernels.casts:CAST_BY_AMAX",
    "cast_transpose_noting_amax": "kernels.casts:CAST_NOTING",
    "amax_of_rows_and_columns": "kernels.casts:AMAX",
    "transpose": "kernels.casts:TRANSPOSE",
    "norm_cast": "kernels.norms:NORM_CAST",
    "norm_gradients": "kernels.norms:NORM_GRADIENTS",
    "swiglu_cast": "kernels.casts:SWIGLU_CAST",
    "swiglu_gradient_cast": "kernels.casts:SWIGLU_GRADIENT_CAST",
    "heads_gradient_cast": "kernels.casts:HEADS_CAST",
    "add_products_grouped_": "grouped_choice:ADD_PRODUCTS",
    "clear_rows_behind_": "grouped_choice:CLEAR_ROWS",
    "cast_along_tokens": "grouped_fp8_choice:CAST",
    "add_fp8_products_grouped_": "grouped_fp8_choice:WEIGHT_GRADS",
    "grouped_scaled_mm": "grouped_fp8_choice:ROW_PRODUCTS",
    "add_fp8_product_": "gemm_choice:WEIGHT_GRADS",
    "residual_gemm": "gemm_choice:RESIDUAL_GEMM",
    "mlp": "layer:MLP_KERNEL",
}.items():
    KERNELS.register(_operation, f"{_HERE}.{_kernel}")

for _backend in ("auto", "flash"):
    ATTENTION_BACKENDS.substitute(_backend, f"{_HERE}.attention.backends:FlashBackend", when=lambda operands: True)
for _backend in OWN_BACKENDS:
    ATTENTION_BACKENDS.register(_backend, f"{_HERE}.attention.backends:{_backend.title()}Backend")
for _backend, _name in FP8_BACKENDS.items():
    ATTENTION_BACKENDS.register(_backend, f"{_HERE}.attention.fp8_attention:{_name}")

CALLBACKS.register(
    "kernel choice",
    f"{_HERE}.hooks:KernelChoice",
    when=lambda config: not (config.parallel.cpu and config.options(Fusions).fusions),
)
