"""FLOPs of a model per token, counted by torch on a fake forward and backward pass of one layer of each kind.

Recomputation is not counted, nor what attention kernels compute twice. Causal attention counts what a token sees: half
of the s x s square, less under a sliding window. MFU and TFLOP/s in the log follow this convention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count, shape_wrapper

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parts import OPTIMIZERS
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.core.transformer.recompute import computing_again
from megatron.extensions.planner.fake_stage import FakeStages, MicroBatch, Part, Unit, fake_stages, layer_kinds

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


class FlopsPerToken(NamedTuple):
    """Model FLOPs of forward and backward per token. Recomputation is not counted."""

    matmul: float
    """6 x the parameters of matrix multiplications of a token, the output layer included, and the products of linear
    attention."""

    attention: float
    """Scores and weighted values of what a token sees."""

    @property
    def total(self) -> float:
        return self.matmul + self.attention


@lru_cache(maxsize=16)
def model_flops(config: TransformerConfig, seq_length: int | None = None) -> FlopsPerToken:
    """Counted on one rank without parallelism, since no layout changes them."""
    length = seq_length or config.seq_length
    seen = [kind.span.mean(length) for kind in config.layers]
    modules = [kind.span.mean(length) for kind in config.mtp_layers]
    # Plain causal attention is one kernel; dropout, windows, chunks, sinks, caps and ALiBi take others, tile by tile.
    config = replace(
        config,
        seq_length=length,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=config.window_size and length,
        attention_chunk_size=config.attention_chunk_size and length,
        position_embedding_type="none" if config.alibi else config.position_embedding_type,
        softmax_type="vanilla",
        window_softmax_type=None,
        attn_logit_softcapping=None,
        recompute_granularity="none",
    )
    batch = MicroBatch(config, ModelParallelConfig(compile=True), 1, "cpu")
    kinds = layer_kinds(batch)
    with fake_stages(batch) as fakes:
        ends = fakes.build(Part(first=True, last=True))
        matmul, attention = _count(fakes, ends, fmean(modules or seen))  # that of the modules
        for (kind, tokens), times in Counter(zip(kinds, seen, strict=True)).items():
            of_layer = _count(fakes, fakes.build(Part((Unit((kinds.index(kind),)),))), tokens)
            matmul, attention = matmul + of_layer[0] * times, attention + of_layer[1] * times
    return FlopsPerToken(matmul, attention)


def flops_per_token(config: TransformerConfig, seq_length: int | None = None) -> float:
    """`model_flops` in one number."""
    return model_flops(config, seq_length).total


def orthogonalization_flops(config: TransformerConfig, optimizer: OptimizerConfig) -> int:
    """FLOPs of one update of the whole model by an optimizer that multiplies matrices, whatever the layout and the
    batch; 0 for others. Ranks of a stage share them."""
    flops: Callable[..., int] | None = getattr(OPTIMIZERS[optimizer.optimizer], "update_flops", None)
    return 0 if flops is None else flops(optimizer, stage_metas(config))


class _FlopCounts(TorchDispatchMode):
    """Adds up FLOPs by operator, by the formulas of torch's FlopCounterMode. That one also follows modules by hooks of
    autograd, in which no `autograd.grad` can run, as the backward of experts does for parts with parameters."""

    def __init__(self, formulas: Mapping[Any, Callable[..., float]]) -> None:
        super().__init__()
        self._formulas = {**flop_registry, **{kind: shape_wrapper(formula) for kind, formula in formulas.items()}}
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, kwargs = func._overloadpacket, kwargs or {}
        out = func(*args, **kwargs)
        if kind in self._formulas and not computing_again():
            self.counts[kind] += self._formulas[kind](*args, **kwargs, out_val=out)
        return out


def _count(fakes: FakeStages, stage: GPTModel, seen: float) -> tuple[float, float]:
    """(FLOPs of matrix multiplications, of attention) per token in a stage."""
    model, length = fakes.batch.model, fakes.batch.model.seq_length
    # A kernel for keys and values of one width multiplies with zeros where they differ.
    widths = model.head_dim, model.value_head_dim
    of_tokens = partial(_attention, share=seen / length, widths=widths[0] != widths[1] and widths)
    formulas: dict[Any, Callable[..., float]] = {
        # Weight gradients are added in place, which torch has no formula of: [m, n] += [m, k] x [k, n].
        aten.addmm_: lambda out, a, b, **_: 2 * a[0] * a[1] * b[1],
        aten._grouped_mm: lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1],
        ATTENTION: of_tokens,
        ATTENTION_BACKWARD: lambda grad, *args, **_: 2 * of_tokens(*args[:3], *args[5:]),
    }
    with _FlopCounts(formulas) as counter:
        _, output = fakes.forward(stage)
        output.backward(torch.ones_like(output))
    counts = counter.counts
    attention = sum(counts.pop(kind, 0) for kind in (ATTENTION, ATTENTION_BACKWARD))
    return sum(counts.values()) / length, attention / length


def _attention(q: Any, k: Any, v: Any, *options: Any, share: float, widths: Any, **_: Any) -> float:
    """`options` are the dropout, and whether the mask is causal; `widths` those of a head's keys and values where they
    differ."""
    causal = len(options) > 1 and options[1]
    heads = q[1]  # torch 2.11 counts no groups of query heads: each head multiplies with its group's keys and values
    of_keys, of_values = widths or (k[-1], v[-1])
    q, k, v = (*q[:3], of_keys), (k[0], heads, k[2], of_keys), (v[0], heads, v[2], of_values)
    below = 2 * share if widths else 1  # tiles beside the diagonal, of which a token sees all, are half of the square
    return sdpa_flop_count(q, k, v) * (share if causal else below)
