"""Count the FLOPs of a model per token in a fake forward and backward pass through one layer of each kind.

Recomputation is not counted, nor is work that attention kernels repeat. For causal attention, only unmasked query-key
pairs are counted: half of the s x s pairs, or fewer under a sliding window. MFU and TFLOP/s in the log are based on
FLOPs that are counted in this way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import NamedTuple

from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.optimizer.transforms import chain_of
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.plan.planner.fake_stage import Part, StageParts, Unit
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import Attention, Product


class FlopsPerToken(NamedTuple):
    """Model FLOPs per token, summed over the forward and the backward pass. Recomputation is not counted."""

    matmul: float
    """FLOPs per token of the products with matrix parameters: 6 x the number of matrix parameters that a token uses,
    including the output layer, plus the products of linear attention."""

    attention: float
    """FLOPs of a token's attention scores and weighted value sums."""

    @property
    def total(self) -> float:
        return self.matmul + self.attention


@lru_cache(maxsize=16)
def model_flops(
    config: TransformerConfig, seq_length: int | None = None, kinds: tuple[int, ...] | None = None
) -> FlopsPerToken:
    """Count the FLOPs of a model. The FLOPs do not depend on the layout, so the model is run on one rank without
    parallelism.

    `kinds` is the result of `PlannerCache.kinds_of(config)`, which shows which layers are identical and therefore have
    equal FLOPs. If `kinds` is not given, all layers are built to find out which are identical.
    """
    length = seq_length or config.seq_length
    seen = [kind.span.mean(length) for kind in config.layers]
    modules = [kind.span.mean(length) for kind in config.mtp_layers]
    # Plain causal attention is one kernel. Attention with dropout, windows, chunks, caps or ALiBi uses other kernels,
    # with one launch per tile. Therefore, plain causal attention is counted here, and the loop below scales the count
    # to the number of visible keys.
    config = replace(
        config,
        seq_length=length,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        window_size=config.window_size and length,
        attention_chunk_size=config.attention_chunk_size and length,
        position_embedding_type="none" if config.alibi else config.position_embedding_type,
        attn_logit_softcapping=None,
        recompute_granularity="none",
    )
    # Packing is disabled, because a kernel that packs attention tiles does not report its launches and pads keys and
    # values to other widths.
    batch = MicroBatch(config, ModelParallelConfig(compile=True), 1, "cuda", packs=False)
    parts = StageParts(batch, kinds=kinds)
    layers = [Part((Unit((number,)),)) for number in range(config.num_layers)]
    found = parts.of([Part(first=True, last=True), *layers])
    products = [each for part in found for each in part.every if isinstance(each, Product) and not each.again]
    attention = 0.0
    # The first recording covers the ends of the model: the embedding, the head, and the multi-token prediction modules.
    for part, tokens in zip(found, [fmean(modules or seen), *seen], strict=True):
        of_square = sum(2 * each.flops for each in part.forward if isinstance(each, Attention))
        attention += 3 * of_square * tokens / length / length  # the backward pass has twice as many FLOPs
    return FlopsPerToken(sum(2 * each.batches * each.m * each.n * each.k for each in products) / length, attention)


def flops_per_token(config: TransformerConfig, seq_length: int | None = None) -> float:
    """Return `model_flops` as a single number."""
    return model_flops(config, seq_length).total


def update_flops(config: TransformerConfig, optimizer: OptimizerConfig) -> int:
    """Return the FLOPs of the matrix products in one optimizer update of the whole model. The optimizer's transforms
    state their FLOPs for each parameter. The FLOPs of an update do not depend on the layout or the batch. The ranks of
    a pipeline stage share the work of an update."""
    return sum(link.flops(meta) for meta in stage_metas(config) for link in chain_of(optimizer, meta))
