"""Mixers of tokens: what a layer has before its MLP, such as attention or a linear attention. This module does not
import torch.

A model has one attention (`--attention-module`). In some layers another mixer may take its place
(`--experimental-attention-variant`, or a letter of `--hybrid-layer-pattern`). Both are registered here:

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
    """Channels of heads."""

    key: int
    """Channels of a query or key head."""

    rotary: int
    """Channels of a query or key head that --rotary-percent is a fraction of."""

    value: int
    """Channels of a value head."""


@dataclass(frozen=True)
class AttentionFacts:
    """Facts about an attention that --attention-module chooses. The defaults suit self-attention.

    Functions are called with the model's configuration, a `megatron.core.config.model.TransformerConfig`."""

    chosen_by: Callable[..., bool] = lambda config: False
    """True if a flag of its own chooses it in place of --attention-module."""

    widths: Callable[..., HeadWidths] | None = None
    """Head widths; None for --kv-channels and --value-channels."""

    grouped: bool = True
    """True if its heads are set by --kv-channels and --num-query-groups, and linear_qkv consists of their rows."""

    rotates: bool = False
    """True if it has a rotary embedding whatever --position-embedding-type is."""

    rope_type: str = "rope"
    """Value of --rope-type if none is given."""

    scales_scores: bool = False
    """True if --mscale-all-dim scales attention scores."""


@dataclass(frozen=True)
class MixerFacts:
    """Facts about a mixer. Functions are called with the model's configuration."""

    attention: AttentionFacts | None = None
    """Facts about an attention of --attention-module; None for a mixer of --experimental-attention-variant."""

    rules: Callable[..., Iterable[object]] | None = None
    """(RunConfig, world size) -> each `Problem` of a model that has the mixer."""

    described: Callable[..., str] = lambda config: ""
    """Text about its heads for a plan, which shows their number and width already."""

    letter: str = ""
    """Letter in --hybrid-layer-pattern."""

    whole_sequences: bool = False
    """True if it sees the tokens of all context-parallel ranks."""

    attends: bool = False
    """True if a variant is the model's attention with something added, whose flags and positions it has."""

    of_layer: Callable[..., LayerKind] = lambda config, number, kind: kind
    """(configuration, layer, kind that the model's flags state) -> kind of the layer with this mixer."""

    recomputed: str = ""
    """A part of it that --recompute-modules can name."""

    recomputed_with: str = ""
    """The flag by which a model has this part."""

    includes: tuple[str, ...] = ()
    """Other mixers that are parts of it, whose flags and rules a model with it has."""


class MixerModule(Protocol):
    """The `nn.Module` that mixes tokens in one layer."""

    def forward(self, x: Tensor, context: object, /) -> Tensor:
        """x [s, b, h] -> [s, b, h], [s/tp, b, h] under sequence parallelism, and s/cp under context parallelism.
        `context` is the micro-batch's `megatron.core.batch.BatchContext`. A mixer keeps what generation needs of
        earlier tokens in `context.cache`."""


class Mixer(Protocol):
    """Makes the mixer of a layer."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """`name` begins the names of its parameters, `config` is the layer's `TransformerConfig`, and `ctx` its
        `megatron.core.tensor_parallel.layers.TPContext`, with the number of the layer."""


MIXERS = Registry("mixer", MixerFacts, protocol=Mixer, makes=MixerModule)
"""Name -> `Mixer`."""

_SELF_ATTENTION = "megatron.core.transformer.self_attention:SelfAttention"
MIXERS.register("self_attention", _SELF_ATTENTION, attention=AttentionFacts(), letter="*")


@dataclass(frozen=True)
class MixerNames(Collection[str]):
    """The mixers that one flag chooses among: attentions of the model, or variants of it."""

    attentions: bool

    def __iter__(self) -> Iterator[str]:
        return (name for name in MIXERS if (MIXERS.facts(name).attention is not None) == self.attentions)

    def __contains__(self, name: object) -> bool:
        return any(name == each for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def where(self, name: str) -> str:
        """File and line of a mixer's registration."""
        return MIXERS.where(name)


ATTENTION_MODULES = MixerNames(attentions=True)
"""Choices of --attention-module."""

ATTENTION_VARIANTS = MixerNames(attentions=False)
"""Choices of --experimental-attention-variant."""


def attention_facts(name: str) -> AttentionFacts:
    """Facts about an attention of --attention-module. Raises ValueError if there is none of this name."""
    facts = MIXERS.facts(name).attention
    if facts is None:
        raise ValueError(f"--attention-module {name}: must be one of {', '.join(ATTENTION_MODULES)}")
    return facts


def with_attention(variant: str | None, *mlp: bool) -> Sublayers:
    """A layer with the model's attention or a variant, and the MLP that the last fields of `Sublayers` state."""
    return Sublayers(variant is None or MIXERS.facts(variant).attends, variant, *mlp)
