"""Flags of sparse attention, their rules, and facts about it before it is imported. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import flag
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import CALLBACKS, LINEAR_ATTENTIONS, linear_format
from megatron.extensions.hybrid_layers.flags import has_linear_attention
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

VARIANT = has_linear_attention("dsa", "D")
MLA = "multi_latent_attention"


@extension_flags("sparse attention", part_of="model")
@dataclass(frozen=True)
class SparseAttentionFlags:
    """The indexer of DeepSeek sparse attention (DSA, DeepSeek-V3.2, arXiv 2512.02556, section 2.1)."""

    NO_EFFECT_WITHOUT: ClassVar = VARIANT

    dsa_indexer_n_heads: int = flag(64, above=0)
    """DSA: query heads of the indexer."""

    dsa_indexer_head_dim: int = flag(128, above=0)
    """DSA: channels of a head of the indexer, the first of which are rotated as --qk-pos-emb-head-dim says."""

    dsa_indexer_topk: int = flag(2048, above=0)
    """DSA: keys that each query sees, those with the largest scores of the indexer."""

    dsa_indexer_loss_coeff: float = flag(1.0, at_least=0)
    """DSA: coefficient of the indexer's loss, the divergence of its distribution over keys from that of attention. The
    indexer learns from this loss alone, and nothing else does."""

    dsa_indexer_use_sparse_loss: bool = False
    """DSA: compare both distributions over the selected keys, and not over all keys that a query could see."""


def indexer(config: TransformerConfig) -> str:
    """The indexer, for a plan."""
    own = config.options(SparseAttentionFlags)
    heads = f"{own.dsa_indexer_n_heads} indexer heads of {own.dsa_indexer_head_dim}"
    return f", {own.dsa_indexer_topk} keys for each query by {heads}"


def sparse_attention(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Rules of a model with sparse attention."""
    m, own, name = c.model, c.options(SparseAttentionFlags), "--experimental-attention-variant"
    shown = "dsa" if m.experimental_attention_variant == "dsa" else None
    name = name if shown else "D in --hybrid-layer-pattern"
    if m.attention != MLA:
        yield Problem(name, shown, "selects the latents of --multi-latent-attention", "add --multi-latent-attention")
    for other, given, why in (
        (f"--attention-dropout {m.attention_dropout:g}", m.attention_dropout, "it drops no weights"),
        (f"--softmax-type {m.softmax_type}", m.softmax_type != "vanilla", "its rows have no sinks"),
        (f"--attn-logit-softcapping {m.attn_logit_softcapping}", m.attn_logit_softcapping, "its scores have no cap"),
        (f"--window-size {m.window_size}", m.window_size, "the indexer selects among all earlier keys"),
        (
            f"--attention-chunk-size {m.attention_chunk_size}",
            m.attention_chunk_size,
            "the indexer selects among all earlier keys",
        ),
        ("--fp8-format", linear_format(c.parallel), "it multiplies by weights of linear layers itself"),
    ):
        if given:
            yield Problem.exclusive(name, shown, other, why)
    if m.attention == MLA and own.dsa_indexer_head_dim < m.rotary_dim:
        rule = f"must be at least the {m.rotary_dim} channels that --qk-pos-emb-head-dim rotates"
        yield Problem("--dsa-indexer-head-dim", own.dsa_indexer_head_dim, rule, f"nearest: {m.rotary_dim}")


def has_loss(c: RunConfig) -> bool:
    """Whether the indexer's loss is trained and logged."""
    return "dsa" in c.model.linear_attentions and c.options(SparseAttentionFlags).dsa_indexer_loss_coeff > 0


LINEAR_ATTENTIONS.register(
    "dsa",
    f"{__package__}.sparse_attention:SparseAttention",
    parameters=f"{__package__}.parameters:sparse_attention_metas",
    rules=f"{__name__}:sparse_attention",
    described=indexer,
    letter="D",
    whole_sequences=True,
    attends=True,
)
CALLBACKS.register("indexer loss", f"{__package__}.hooks:IndexerLoss", when=has_loss)
