"""Registers self-attention with normalized values, and defines its flag and flag rules. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.config.mixers import MIXERS, AttentionFacts
from megatron.core.config.model import TransformerConfig
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import extension_flags

NAME = "normed_values"
CHOICE = f"--attention-module {NAME}"
SHARED = "--kv-shared-layers"


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the flags of models with normalized values."""
    m = config.model
    if m.clip_qkv is not None:
        yield Problem.exclusive(
            CHOICE, None, f"--clip-qkv {m.clip_qkv:g}", "it would clip values after they are normalized"
        )
    if config.options(NormedValuesFlags).kv_shared_layers:
        yield from _shared_layers(config)
    if not config.options(NormedValuesFlags).global_keys_as_values:
        return
    for name, given in (
        ("--attention-output-gate", m.attention_output_gate),
        ("--head-wise-attn-gate", m.head_wise_attn_gate),
        (f"--value-channels {m.value_channels}", m.value_channels not in (None, m.head_dim)),
    ):
        if given:
            yield Problem.exclusive("--global-keys-as-values", None, name, "keys serve as values")


def source_of(config: TransformerConfig, number: int) -> int | None:
    """Return the number of the layer whose keys and values layer `number` reuses; return None if layer `number`
    projects its own keys and values.

    Raise ValueError if no earlier layer of the same kind has keys and values.
    """
    first = config.num_layers - config.options(NormedValuesFlags).kv_shared_layers
    if not first <= number < config.num_layers:
        return None
    local = config.local_pattern
    same = [layer for layer in range(first) if local[layer] == local[number]]
    if not same:
        kind = "a" if local[number] else "no"
        raise ValueError(f"layer {number} has {kind} sliding window, but no layer before layer {first} is of this kind")
    return same[-1]


def _shared_layers(c: RunConfig) -> Iterator[Problem]:
    """Check that each layer without key and value projections can reuse the keys and values of an earlier layer."""
    m, count = c.model, c.options(NormedValuesFlags).kv_shared_layers
    if any(getattr(each, "qk_clip", False) for each in c.extension_options):
        yield Problem.exclusive(SHARED, count, "--qk-clip", "several layers with different scores share the same keys")
    if m.norm_placement == "sum" or m.linear_attentions:
        why = (
            "every layer must have attention" if m.linear_attentions else "layers without input norms cannot share keys"
        )
        other = "layers of another kind" if m.linear_attentions else "--norm-placement sum"
        yield Problem.exclusive(SHARED, count, other, why)
        return
    if m.num_layers <= count:
        rule = f"must be below --num-layers {m.num_layers}: the first layers project the keys"
        yield Problem(SHARED, count, rule, f"use at most {m.num_layers - 1}")
        return
    try:
        sources = [source_of(m, number) for number in range(m.num_layers)]
    except ValueError as error:
        yield Problem(SHARED, count, str(error), "use a smaller number, or a different --window-attn-skip-freq")
        return
    yield from _of_other_stages(c, sources)


def _of_other_stages(c: RunConfig, sources: list[int | None]) -> Iterator[Problem]:
    """Check that no layer reuses keys and values of a layer in another pipeline stage."""
    if c.model.vocab_size is None:
        return  # the stages depend on the vocabulary size; this rule runs again when the size is known
    try:
        from megatron.core.pipeline_parallel.layer_split import pipeline_stages  # imports torch

        stages = pipeline_stages(c.model, c.parallel)
    except (ArithmeticError, AssertionError, ValueError):
        return  # another rule reports invalid stages
    for stage in stages:
        for number in stage.layers:
            source = sources[number]
            if source is not None and source not in stage.layers:
                rule = f"lets layer {number} use keys and values of layer {source}, which is in another pipeline stage"
                remedy = f"begin a stage at or before layer {source} by --pipeline-model-parallel-layout, or use --pp 1"
                yield Problem(SHARED, c.options(NormedValuesFlags).kv_shared_layers, rule, remedy)
                return


@extension_flags("normalized values", part_of="model")
@dataclass(frozen=True)
class NormedValuesFlags:
    """Self-attention whose values are normalized (Gemma 4)."""

    NO_EFFECT_WITHOUT: ClassVar = Condition(CHOICE, lambda config: config.model.attention == NAME)

    global_keys_as_values: bool = False
    """Normalized values: layers without a sliding window or attention chunks have no value projection. The keys of
    these layers, before norm and rotary embedding, serve as values."""

    kv_shared_layers: int = flag(0, at_least=0)
    """Normalized values: number of layers at the end of the model that project only queries. Each of these layers
    reuses the keys and values of the last layer of the same kind that projects keys and values. There are two kinds of
    layers: layers with a sliding window or attention chunks, and layers without them."""


MIXERS.register(NAME, f"{__package__}.{NAME}:NormedValueAttention", attention=AttentionFacts(), rules=rules)
