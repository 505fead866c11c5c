"""Layers with one sublayer each, specified by a pattern of letters as in Megatron-LM. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megatron.core.config.layers import Sublayers
from megatron.core.config.mixers import ATTENTION_VARIANTS, MIXERS, with_attention
from megatron.core.config.model import TransformerConfig
from megatron.extensions.layers.hybrid_layers.flags import DENSE, EXPERTS, PATTERN, HybridConfig
from megatron.training.config.flags import field_table, named_value, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.rules.model import without_attention
from megatron.training.config.run_config import RunConfig

LAYOUT = "pipeline_model_parallel_layout"
"""Name of the configuration field for the pipeline layout. The extension pipeline_split defines this field."""


class LayerPattern(NamedTuple):
    """Parsed value of --hybrid-layer-pattern."""

    stages: tuple[str, ...]
    """For each pipeline stage, the letters of its layers. If the pattern contains no stage borders, there is a single
    entry with all layers."""

    modules: tuple[str, ...]
    """For each multi-token prediction module, the letters of its sublayers."""

    @property
    def layers(self) -> str:
        return "".join(self.stages)

    @property
    def without_stages(self) -> str:
        """The pattern as text, without the stage borders."""
        return "/".join((self.layers, *self.modules))


def read_pattern(text: str) -> LayerPattern:
    """Parse --hybrid-layer-pattern, without validating the letters."""
    layers, *modules = text.split("/")
    return LayerPattern(tuple(layers.split("|")), tuple(modules))


def attention_letter(config: TransformerConfig) -> str:
    """Return the letter of layers with the model's attention module."""
    return config.attention_mixer.letter or "*"


def letters(config: TransformerConfig) -> dict[str, Sublayers]:
    """Return a mapping from each letter that this model supports to the sublayers of the layer."""
    variants = {MIXERS.facts(name).letter: with_attention(name) for name in ATTENTION_VARIANTS}
    found = {attention_letter(config): Sublayers(attends=True)} | variants
    found |= {DENSE: Sublayers(mlp=True), EXPERTS: Sublayers(mlp=True, experts=True)}
    return {letter: sublayers for letter, sublayers in found.items() if letter}


def hybrid_layers(config: TransformerConfig) -> tuple[Sublayers, ...]:
    """Return the sublayers of each layer that --hybrid-layer-pattern specifies, followed by the sublayers of each
    multi-token prediction module. If the pattern contains no multi-token prediction modules, each module has the
    sublayers of the last layer. Raise ValueError if the pattern is invalid."""
    known, pattern = letters(config), read_pattern(config.options(HybridConfig).hybrid_layer_pattern or "")
    unknown = next((letter for letter in "".join((pattern.layers, *pattern.modules)) if letter not in known), None)
    if unknown is not None:
        raise ValueError(f"has {unknown}, which is not a layer of this model; use {' '.join(known)}")
    if not pattern.layers:
        raise ValueError(f"has no layers; use for example {attention_letter(config)}{DENSE}")
    if len(pattern.layers) != config.num_layers:
        rule = f"has {len(pattern.layers)} layers, but --num-layers is {config.num_layers}"
        raise ValueError(f"{rule}; add or remove letters, or remove --num-layers")
    if pattern.modules and config.mtp_depths not in (0, len(pattern.modules)):
        rule = f"has {len(pattern.modules)} modules after /, but --mtp-num-layers is {config.mtp_depths}"
        raise ValueError(f"{rule}; remove --mtp-num-layers")
    modules = pattern.modules or pattern.layers[-1:] * config.mtp_depths
    for module in modules:
        if [known[letter].mlp for letter in module] not in ([False, True], [False], [True]):
            rule = f"has {module or 'nothing'} after /, but a multi-token prediction module is one layer"
            raise ValueError(f"{rule}; use a mixer, an MLP, or a mixer and an MLP such as *-")
    every = (*pattern.layers, *modules[: config.mtp_depths])
    return tuple(_together([known[letter] for letter in of_layer]) for of_layer in every)


def _together(parts: list[Sublayers]) -> Sublayers:
    """Combine sublayers into one layer: a mixer, an MLP, or a mixer followed by an MLP."""
    first, last = parts[0], parts[-1]
    return Sublayers(first.attends, first.linear, last.mlp, last.experts)


def with_pattern(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration with the number of layers, the number of multi-token prediction modules and
    the pipeline stages from --hybrid-layer-pattern. Stage borders are moved from the pattern to the pipeline layout
    field, so that the pattern is the same under every pipeline layout."""
    model, text = config.model, config.options(HybridConfig).hybrid_layer_pattern
    if text is None:
        return config
    pattern = read_pattern(text)
    depths = len(pattern.modules) or None if model.mtp_num_layers is None else model.mtp_num_layers
    values: dict[str, object] = {"num_layers": model.num_layers or len(pattern.layers), "mtp_num_layers": depths}
    if len(pattern.stages) > 1 and LAYOUT in field_table() and named_value(config, LAYOUT) is None:
        stages = "|".join("t" * len(stage) for stage in pattern.stages)
        values |= {"hybrid_layer_pattern": pattern.without_stages, LAYOUT: f"E{stages}{'m' * (depths or 0)}L"}
    return with_named(config, values)


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check --hybrid-layer-pattern."""
    m, pattern = c.model, c.options(HybridConfig).hybrid_layer_pattern
    if pattern is None:
        return
    if "|" in pattern and LAYOUT not in field_table():
        rule = "has |, a stage border, which only the extension pipeline_split supports"
        yield Problem(PATTERN, pattern, rule, "restore it, or remove |")
    elif "|" in pattern and named_value(c, LAYOUT) is not None:
        why = "both define the stages"
        yield Problem.exclusive(PATTERN, pattern, f"{field_table()[LAYOUT].name} {named_value(c, LAYOUT)}", why)
    try:
        layers = hybrid_layers(m)
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        yield Problem(PATTERN, pattern, rule, remedy)
        return
    if any(parts.experts for parts in layers) and m.num_experts is None:
        yield Problem(
            PATTERN, pattern, f"has {EXPERTS}, a layer with experts, without --num-experts", "add it, or use - for E"
        )
    elif m.num_experts is not None and not m.moe_layers:
        rule = f"has no effect without {EXPERTS}, a layer with experts, in {PATTERN} {pattern}"
        yield Problem("--num-experts", m.num_experts, rule, f"write {EXPERTS} for some -, or remove it")
    if not any(parts.attends for parts in layers):
        letter = attention_letter(m)
        yield from without_attention(c, "where no layer has attention", f"{letter} in {PATTERN}")
