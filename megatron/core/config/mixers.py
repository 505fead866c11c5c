"""Token mixers: the sublayer before a layer's MLP, such as attention or linear attention.
This module does not import torch.

A model has one attention module (`--attention-module`). In some layers, another mixer may replace the attention module
(`--experimental-attention-variant`, or a letter of `--hybrid-layer-pattern`). Both kinds of mixers are registered here:

    @MIXERS.register("moving_average", letter="A")
    class MovingAverage(nn.Module):
        def __init__(self, name: str, config: TransformerConfig, ctx: TPContext) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megatron.core.config.flag_spec import Section
from megatron.core.config.layers import LayerKind, Sublayers
from megatron.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor, nn


class HeadWidths(NamedTuple):
    """Numbers of channels of the attention heads."""

    key: int
    """Number of channels in a query or key head."""

    rotary: int
    """Number of channels in a query or key head that --rotary-percent 1 would rotate."""

    value: int
    """Number of channels in a value head."""


@dataclass(frozen=True)
class AttentionFacts:
    """Properties of an attention module, a value of --attention-module. The defaults of `AttentionFacts` describe
    ordinary self-attention. The functions among the fields receive the model's configuration, a
    `megatron.core.config.model.TransformerConfig`."""

    chosen_by: Callable[..., bool] = lambda config: False
    """Predicate that decides whether a flag of the attention module selects the module, and thereby overrides
    --attention-module."""

    widths: Callable[..., HeadWidths] | None = None
    """Function that returns the head widths; None if --kv-channels and --value-channels determine the widths."""

    grouped: bool = True
    """True if the module has the heads that --kv-channels and --num-query-groups describe, and linear_qkv contains
    exactly the rows of these heads."""

    rotates: bool = False
    """True if the attention module uses a rotary embedding regardless of --position-embedding-type."""

    rope_type: str = "rope"
    """Default of --rope-type for this attention module."""

    scales_scores: bool = False
    """True if the module scales attention scores by the factor that follows from --mscale-all-dim."""


@dataclass(frozen=True)
class MixerFacts:
    """Properties of a mixer. The functions among the fields receive the model's configuration as argument."""

    attention: AttentionFacts | None = None
    """Properties of an attention module, if --attention-module selects the mixer; None if
    --experimental-attention-variant selects it."""

    rules: Callable[..., Iterable[object]] | None = None
    """Validation rule for models with this mixer: a function of (RunConfig, world size) that returns the `Problem`s of
    the run."""

    described: Callable[..., str] = lambda config: ""
    """Function that returns a short description of the mixer. Plans print the description after the number and width of
    the heads."""

    letter: str = ""
    """Letter that represents the mixer in --hybrid-layer-pattern."""

    whole_sequences: bool = False
    """True if the mixer processes whole sequences under context parallelism, instead of only the tokens of this
    rank."""

    attends: bool = False
    """True if the mixer extends the model's attention, and therefore uses the attention flags and the token
    positions."""

    of_layer: Callable[..., LayerKind] = lambda config, number, kind: kind
    """Function that returns the `LayerKind` of a layer with this mixer. The function receives the configuration, the
    layer number, and the `LayerKind` that follows from the model's flags."""

    recomputed: str = ""
    """Name by which --recompute-modules selects the part of the mixer that can be recomputed; empty if no part of the
    mixer can be recomputed."""

    recomputed_with: str = ""
    """Flag that adds the part named by `recomputed` to a model."""

    includes: tuple[str, ...] = ()
    """Names of the mixers that this mixer contains. The flags and rules of the contained mixers also apply to a model
    that uses this mixer."""


class MixerModule(Protocol):
    """The `nn.Module` that mixes tokens in one layer."""

    def forward(self, x: Tensor, context: object, /) -> Tensor:
        """Map hidden states x [s, b, h] -> [s, b, h]. Sequence parallelism divides s by tp, and context parallelism
        divides s by cp. `context` is the micro-batch's `megatron.core.batch.BatchContext`. During generation, a mixer
        stores its state after the earlier tokens in `context.cache`."""


class Mixer(Protocol):
    """Class or function that creates the mixer of a layer."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Create the mixer. `name` is the prefix of the parameter names, `config` is the layer's `TransformerConfig`,
        and `ctx` is the layer's `megatron.core.tensor_parallel.layers.TPContext`. `ctx.layer` is the layer number."""


MIXERS = Registry("mixer", MixerFacts, protocol=Mixer, makes=MixerModule)
"""Registry that maps the name of each mixer to a `Mixer`."""

_SELF_ATTENTION = "megatron.core.transformer.self_attention:SelfAttention"
MIXERS.register("self_attention", _SELF_ATTENTION, attention=AttentionFacts(), letter="*")


@dataclass(frozen=True)
class MixerNames(Collection[str]):
    """Names of the mixers that one flag can select; the flag is --attention-module or
    --experimental-attention-variant."""

    attentions: bool

    def __iter__(self) -> Iterator[str]:
        return (name for name in MIXERS if (MIXERS.facts(name).attention is not None) == self.attentions)

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def where(self, name: str) -> str:
        """Return the file and line at which a mixer is registered."""
        return MIXERS.where(name)


ATTENTION_MODULES = MixerNames(attentions=True)
"""Choices of --attention-module."""

ATTENTION_VARIANTS = MixerNames(attentions=False)
"""Choices of --experimental-attention-variant."""


def attention_facts(name: str) -> AttentionFacts:
    """Return the properties of the attention module that --attention-module selects by this name. The function raises
    ValueError if the name is not registered."""
    facts = MIXERS.facts(name).attention
    if facts is None:
        raise ValueError(f"--attention-module {name}: must be one of {', '.join(ATTENTION_MODULES)}")
    return facts


def with_attention(variant: str | None, *mlp: bool) -> Sublayers:
    """Return the sublayers of a layer. The mixer of the layer is `variant`, or the model's attention if `variant` is
    None. `mlp` contains the values of the fields `mlp` and `experts` of `Sublayers`."""
    return Sublayers(variant is None or MIXERS.facts(variant).attends, variant, *mlp)
