"""Where a kernel of attention has no effect. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

OWN_BACKENDS = "flash3", "cudnn", "triton"
"""Choices of --attention-backend beside those of torch."""


def attention_kernel(c: RunConfig, fuses: bool) -> Iterator[Problem]:
    """Kernels of GPUs, which compute neither everything nor in every precision: other kernels do that then."""
    m, p = c.model, c.parallel
    backend, cap = p.attention_backend, m.attn_logit_softcapping
    if backend not in ("flash", *OWN_BACKENDS):
        return
    if not fuses and backend in OWN_BACKENDS:
        rule = "has no effect beside --no-fusions: kernels of torch compute attention"
        yield Problem("--attention-backend", backend, rule, "remove one of them", harmless=True)
    some_local = any(width is not None and width < m.seq_length for width in (m.window_size, m.attention_chunk_size))
    local = "--window-size" if m.window_size is not None else "--attention-chunk-size"
    cudnn, triton, drops = backend == "cudnn", backend == "triton", m.attention_dropout > 0
    wide = not (p.bf16 or p.fp16)
    with_dropout = "plain torch" if p.cpu or wide else "the kernel triton"
    for beside, given, why in (
        # torch has a FlashAttention for CPUs, which computes in all precisions.
        ("--cpu", p.cpu and backend != "flash", "it is a kernel of GPUs"),
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
            rule = f"has no effect beside {beside}: {why}"
            yield Problem("--attention-backend", backend, rule, "remove one of them", harmless=True)
