"""Sublayers of each layer, and the pattern that states them in Megatron-LM's letters. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.config.flag_spec import Condition, flag
from megatron.core.parts import LINEAR_ATTENTIONS

PATTERN = "--hybrid-layer-pattern"
DENSE, EXPERTS = "-", "E"


@dataclass(frozen=True)
class Sublayers:
    """A layer's parts: something that mixes tokens, something that mixes channels, or both in this order."""

    attends: bool = False
    """Whether it has the model's attention."""

    linear: str | None = None
    """Name of its entry of LINEAR_ATTENTIONS, in place of the module of the model's attention."""

    mlp: bool = False
    """Whether it has an MLP, dense or of experts."""

    experts: bool = False
    """Whether its MLP is a mixture of experts."""

    @property
    def mixes(self) -> bool:
        """Whether it mixes tokens."""
        return self.attends or self.linear is not None


@dataclass(frozen=True)
class HybridConfig:
    """Layers of one sublayer each."""

    hybrid_layer_pattern: str | None = flag(
        None,
        "--hybrid-override-pattern",
        excludes=(
            "--experimental-attention-variant: letters say which layers have linear attention",
            Condition(
                "--moe-layer-freq: letters say which layers have experts",
                lambda config: config.model.moe_layer_freq != "1",
            ),
            "--parallel-residual: a layer has one sublayer",
        ),
    )
    """Layers of one sublayer each, a letter for each layer: * attention (+ with --multi-latent-attention), G gated
    delta net, M Mamba-2, C short convolution, L lightning attention, K Kimi Delta Attention, - MLP, E experts. |
    begins the next pipeline stage. / begins a module of multi-token prediction: a mixer, an MLP, or both. Replaces
    --num-layers and --mtp-num-layers. Default: each layer has a mixer and an MLP."""

    @property
    def dense_layers(self: Any) -> tuple[int, ...]:
        """Layers with an MLP that is none of experts, by number. ValueError if a pattern of layers cannot be read."""
        if self.hybrid_layer_pattern is None:
            return tuple(number for number, moe in enumerate(self.expert_pattern) if not moe)
        return tuple(number for number, kind in enumerate(self.layers) if kind.mlp and not kind.experts)

    @property
    def linear_attentions(self: Any) -> tuple[str, ...]:
        """Names of the linear attentions that the model has. ValueError if --hybrid-layer-pattern cannot be read."""
        if self.hybrid_layer_pattern is None:
            return () if self.experimental_attention_variant is None else (self.experimental_attention_variant,)
        return tuple(dict.fromkeys(kind.linear for kind in hybrid_layers(self) if kind.linear is not None))


class LayerPattern(NamedTuple):
    """A pattern's letters."""

    stages: tuple[str, ...]
    """Of the layers of each pipeline stage; one stage where the pattern has none."""

    modules: tuple[str, ...]
    """Of each module of multi-token prediction."""

    @property
    def layers(self) -> str:
        return "".join(self.stages)

    @property
    def without_stages(self) -> str:
        """The text that states the same model."""
        return "/".join((self.layers, *self.modules))


def read_pattern(text: str) -> LayerPattern:
    """The letters of --hybrid-layer-pattern, legal or not."""
    layers, *modules = text.split("/")
    return LayerPattern(tuple(layers.split("|")), tuple(modules))


def has_linear_attention(name: str, letter: str) -> Condition:
    """What flags of a linear attention depend on."""

    def holds(config: Any) -> bool:
        try:
            return name in config.model.linear_attentions
        except ValueError:
            return True  # a rule reports the pattern

    return Condition(f"--experimental-attention-variant {name} or {letter} in {PATTERN}", holds)


def letters(config: Any) -> dict[str, Sublayers]:
    """Letter -> the layer that it stands for in this model."""
    variants = {LINEAR_ATTENTIONS.facts(name).letter: with_attention(name) for name in LINEAR_ATTENTIONS}
    found = {config.attention_facts.letter: Sublayers(attends=True)} | variants
    found |= {DENSE: Sublayers(mlp=True), EXPERTS: Sublayers(mlp=True, experts=True)}
    return {letter: sublayers for letter, sublayers in found.items() if letter}


def with_attention(variant: str | None, *mlp: bool) -> Sublayers:
    """A layer with the model's attention or a variant, and the MLP that the last fields of `Sublayers` state."""
    return Sublayers(variant is None or LINEAR_ATTENTIONS.facts(variant).attends, variant, *mlp)


def hybrid_layers(config: Any) -> tuple[Sublayers, ...]:
    """Sublayers of all layers of a model with a pattern, followed by those of its modules of multi-token prediction:
    without letters of their own these are like the last layer. ValueError if the pattern is not legal."""
    known, pattern = letters(config), read_pattern(config.hybrid_layer_pattern)
    unknown = next((letter for letter in "".join((pattern.layers, *pattern.modules)) if letter not in known), None)
    if unknown is not None:
        raise ValueError(f"has {unknown}, which is no layer of this model; use {' '.join(known)}")
    if not pattern.layers:
        raise ValueError(f"has no layers; use for example {config.attention_facts.letter or '*'}{DENSE}")
    if len(pattern.layers) != config.num_layers:
        rule = f"has {len(pattern.layers)} layers, which must be --num-layers {config.num_layers}"
        raise ValueError(f"{rule}; add or remove letters, or leave out --num-layers")
    if pattern.modules and config.mtp_depths not in (0, len(pattern.modules)):
        rule = f"has {len(pattern.modules)} modules behind /, which must be --mtp-num-layers {config.mtp_depths}"
        raise ValueError(f"{rule}; leave out --mtp-num-layers")
    modules = pattern.modules or pattern.layers[-1:] * config.mtp_depths
    for module in modules:
        if [known[letter].mlp for letter in module] not in ([False, True], [False], [True]):
            rule = f"has {module or 'nothing'} behind /, and a module of multi-token prediction is one layer"
            raise ValueError(f"{rule}; use a mixer, an MLP, or a mixer and an MLP such as *-")
    every = (*pattern.layers, *modules[: config.mtp_depths])
    return tuple(_together([known[letter] for letter in of_layer]) for of_layer in every)


def _together(parts: list[Sublayers]) -> Sublayers:
    """The layer that has all these parts: a mixer, an MLP, or both."""
    first, last = parts[0], parts[-1]
    return Sublayers(first.attends, first.linear, last.mlp, last.experts)
