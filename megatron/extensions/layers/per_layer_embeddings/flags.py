"""Registers per-layer embeddings, and defines their flag and flag rules.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.layers import RESIDUALS
from megatron.core.config.model import TransformerConfig
from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

SWITCH = "--per-layer-embedding-size"
GATES = {"geglu_tanh": "tanh", "geglu": "none", "swiglu": "silu"}
"""Mapping from the MLP's activation function to the activation function of the embedding gates: the value "silu"
selects SiLU, and other values are the argument `approximate` of GELU."""


def size_of(config: TransformerConfig) -> int:
    """Return the number of channels of each layer's embeddings; 0 if the model has no per-layer embeddings."""
    return config.options(PerLayerEmbeddingFlags).per_layer_embedding_size or 0


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with per-layer embeddings."""
    m = config.model
    size, ranks = size_of(m), config.parallel.tensor_model_parallel_size
    if not size:
        return
    if m.activation not in GATES:
        rule = f"gates embeddings with the function that gates the MLP; known are {', '.join(GATES)}"
        yield Problem(SWITCH, size, rule, f"use one of them, not {m.activation}")
    with suppress(ValueError):  # other rules report an invalid layer pattern
        if not all(kind.mixes and kind.mlp for kind in m.layers):
            yield Problem(SWITCH, size, "follows the MLP of each layer, but some layers have no MLP", "remove it")
    if not divides(ranks, size):
        rule = f"must be a multiple of --tensor-model-parallel-size {ranks}, whose ranks share the channels"
        yield Problem(SWITCH, size, rule, multiples(size, max(ranks, 1)))
    elif (chosen := linear_format(config.parallel)) is not None:
        alignment, under = LINEAR_FORMATS.facts(chosen).alignment(config.parallel, ranks)
        if size // ranks % alignment:
            rule = f"divided by --tensor-model-parallel-size {ranks} must be a multiple of {alignment} under {under}"
            yield Problem(SWITCH, size, rule, multiples(size, alignment * ranks))


@extension_flags("per-layer embeddings", part_of="model", rules=rules)
@dataclass(frozen=True)
class PerLayerEmbeddingFlags:
    """Per-layer embeddings (PLE; Gemma 3n, Gemma 4)."""

    per_layer_embedding_size: int | None = flag(
        None,
        above=0,
        excludes=(
            Condition(
                "--norm-placement sum: its layers have no residual stream", lambda config: config.model.norms_sums
            ),
            "--parallel-residual: the embeddings are added after the MLP",
            "--mtp-num-layers: multi-token prediction modules have no per-layer embeddings",
        ),
    )
    """Per-layer embeddings: number of channels of each layer's embedding table. After its MLP, each layer adds norm(W
    (act(G x) * p)) to the hidden states x. The vector p combines the token's row of the table with a projection of the
    token's word embedding (Gemma 4)."""


RESIDUALS.register(
    "per_layer_embeddings",
    f"{__package__}.residual:PerLayerEmbeddings",
    switch=SWITCH,
    when=lambda config: size_of(config) > 0,
    width=lambda config: 2 * config.hidden_size + size_of(config),
    layers=("transformer_layer", "scaled_layer"),
)
