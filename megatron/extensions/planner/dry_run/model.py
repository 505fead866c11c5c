"""The model of a dry run: shape, parameters and FLOPs."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.config.model import TransformerConfig
from megatron.core.parts import LINEAR_ATTENTIONS
from megatron.core.pipeline_parallel.stage_parameters import active_parameters, count_parameters
from megatron.training.config.description import shape_line
from megatron.training.config.run_config import RunConfig


def model_lines(config: RunConfig) -> Iterator[str]:
    """Shape, parameters and FLOPs of the model."""
    from megatron.extensions.planner.flops import model_flops, orthogonalization_flops

    m = config.model
    yield shape_line(m)
    attention = _local_attention(m) + _sinks(m)
    yield f"sequence length {m.seq_length}, positions {_positions(m)}{attention}, {m.normalization}"
    if any(m.linear_pattern):
        variant = str(m.experimental_attention_variant)
        yield f"{sum(m.linear_pattern)} layers with {variant}{LINEAR_ATTENTIONS.facts(variant).described(m)}"
    tied = "tied to" if m.tied_embeddings else "not tied to"
    source = "" if config.tokenizer.tokenizer_type else " (no tokenizer is named)"
    yield f"vocabulary {m.vocab_size:,}{source}, padded to {m.padded_vocab_size:,}, {tied} the output layer"
    if m.num_experts is not None:
        yield _experts_line(m)
    if m.mtp_depths:
        share = f"their mean loss times {m.mtp_loss_scaling_factor:g}"
        yield f"multi-token prediction: {m.mtp_depths} modules of a layer like the last one each, {share}"
    count = count_parameters(m)
    active = f", of which a token meets {active_parameters(m):,}" if m.num_experts is not None else ""
    yield f"parameters {count.total:,}{active}"
    for part, number in vars(count).items():
        if number or part not in ("router", "experts", "other"):
            yield f"    {part.replace('_', ' '):<14}{number:>22,}"
    flops = model_flops(m)
    counted = "active parameters" if m.num_experts is not None else "parameters"
    yield (
        f"FLOPs per token {flops.total:.6g} forward and backward: {flops.matmul:.6g} matrix multiplications "
        f"(6 x {counted}), {flops.attention:.6g} attention (causal: half of the square), counted on fake tensors"
    )
    if update := orthogonalization_flops(m, config.optimizer):
        tokens = (config.training.global_batch_size or 1) * m.seq_length
        of_batch = update / (flops.total * tokens)
        yield f"FLOPs of Muon's iterations {update:.6g}, {of_batch:.2%} of those of a batch of {tokens:,} tokens"


def _positions(m: TransformerConfig) -> str:
    rotated = sum(m.rope_pattern)
    where = "" if not m.rotary or rotated == m.num_layers else f" in {rotated or 'no'} layers"
    return m.position_embedding_type + where


def _local_attention(m: TransformerConfig) -> str:
    local = sum(m.local_pattern)
    kind = f"chunks of {m.attention_chunk_size}" if m.attention_chunk_size else f"window {m.window_size}"
    where = f" in {local} layers" if local < m.num_layers else ""
    own = dict(m.local_own)
    shown = [
        f"{own['num_attention_heads']} heads" if "num_attention_heads" in own else "",
        f"{own['num_query_groups']} groups" if "num_query_groups" in own else "",
        SINKS[own["softmax_type"]] or "no sinks" if "softmax_type" in own else "",
    ]
    heads = f" ({', '.join(filter(None, shown))})" if any(shown) else ""
    return f", {kind}{where}{heads}" if local else ""


SINKS = {"vanilla": "", "off-by-one": "attention sinks of 0", "learnable": "attention sinks"}


def _sinks(m: TransformerConfig) -> str:
    return f", {SINKS[m.softmax_type]}" if SINKS[m.softmax_type] else ""


def _experts_line(m: TransformerConfig) -> str:
    shared = m.moe_shared_expert_intermediate_size
    latent = f" behind latents of {m.moe_latent_size}" if m.moe_latent_size else ""
    beside = f" and a shared one of {shared}" if shared else ""
    groups = f" in {m.moe_router_group_topk} of {m.moe_router_num_groups} groups" if m.moe_router_group_topk else ""
    return (
        f"{m.num_experts} experts of {m.moe_ffn_size}{latent} in {len(m.moe_layers)} layers, each token to "
        f"{m.moe_router_topk} of them{groups}{beside}; {m.moe_router_scores} scores, balanced by "
        f"{' and '.join(m.moe_router_load_balancing_type)}"
    )
