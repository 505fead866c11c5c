"""Layers: what a layer and its residual stream are, in what layers of a model differ, and the patterns of flags that
state it. This module does not import torch.

@LAYERS.register("my_layer")
class MyLayer(TransformerLayer):
    def forward(self, x: Tensor, context: BatchContext) -> Tensor: ...
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from megatron.core.config.flag_spec import Section
from megatron.core.registry import NoFacts, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

ContextT = TypeVar("ContextT")


class LayerModule(Protocol):
    """One layer, an `nn.Module`."""

    def forward(self, x: Tensor, context: object, /) -> Tensor:
        """x [s, b, w] -> [s, b, w], [s/tp, b, w] under sequence parallelism, and s/cp under context parallelism. w is
        the residual stream's width, --hidden-size if there is one stream. `context` is the micro-batch's
        `megatron.core.batch.BatchContext`."""


class Layer(Protocol):
    """Makes one layer. `megatron.core.transformer.layer.TransformerLayer` is a class to derive from: its `build_mlp`
    makes the MLP of layers without experts."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """`name` begins the names of its parameters, `config` is the layer's `TransformerConfig`, and `ctx` its
        `megatron.core.tensor_parallel.layers.TPContext`, with the number of the layer."""


LAYERS = Registry("--layer-module", NoFacts, protocol=Layer, makes=LayerModule)
"""Name -> `Layer`."""

LAYERS.register("transformer_layer", "megatron.core.transformer.layer:TransformerLayer")


@dataclass(frozen=True)
class ResidualFacts:
    """Facts about a residual stream. Functions are called with the model's configuration, a
    `megatron.core.config.model.TransformerConfig`."""

    when: Callable[..., bool]
    """True if the model has this stream. The first one for which it is true is taken."""

    width: Callable[..., int]
    """Channels of the stream between layers, which pipeline stages send to each other."""

    recomputed: str = ""
    """A part of it that --recompute-modules can name."""

    recomputed_with: str = ""
    """The flag by which a model has this part."""

    experts_apart: bool = False
    """True if a layer of experts gives it the outputs of the shared expert and of the chosen ones side by side."""


class ResidualModule(Protocol):
    """Connects one sublayer to the residual stream, an `nn.Module`."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor, ContextT], Tensor], context: ContextT, /) -> Tensor:
        """Calls the sublayer with hidden states [s, b, h] of the stream x [s, b, w], and adds its output to the
        stream: -> [s, b, w]. Under sequence parallelism, s/tp replaces s."""


class ResidualClass(Protocol):
    """A class of residual streams other than hidden states to which outputs are added."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Make the connection of one sublayer. `name` is the sublayer's, `config` the layer's `TransformerConfig`, and
        `ctx` its `megatron.core.tensor_parallel.layers.TPContext`."""

    def enter(self, x: Tensor, config: Section) -> Tensor:
        """Convert hidden states to a residual stream: x [s, b, h] -> [s, b, w]. A static method."""

    def leave(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Build the module that converts the stream after the last layer to hidden states, [s, b, w] -> [s, b, h].

        `name` is the name of the norm that follows. A static method.
        """


RESIDUALS = Registry("residual stream", ResidualFacts, protocol=ResidualClass, makes=ResidualModule)
"""Name -> `ResidualClass`. The library has none: extensions add them."""


@dataclass(frozen=True)
class Span:
    """Which earlier tokens of its document a token attends to, itself included. All of them by default."""

    window: int | None = None
    """Only this number of the last tokens."""

    chunk: int | None = None
    """Attention within a chunk only: documents are cut into chunks of this many tokens (Llama 4)."""

    def mean(self, length: int) -> float:
        """Mean number of tokens that a token of a document of `length` tokens attends to: s/2 by the convention for
        causal attention, less in a window (w - w^2 / 2s) or in chunks."""
        if self.chunk is not None and self.chunk < length:
            whole, rest = divmod(length, self.chunk)
            return (whole * self.chunk**2 + rest**2) / (2 * length)
        w = min(self.window or length, length)
        return w * (1 - w / (2 * length))

    def hides(self, length: int) -> bool:
        """Return whether some token does not see all earlier ones of a document of `length` tokens."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding of the model."""

    base: float
    scaled: bool = True
    """True if the model's scaling of frequencies and interpolation of positions apply."""

    percent: float = 1.0
    """Fraction of each head's channels that are rotated."""

    channels: int | None = None
    """Channels of the heads that it rotates; None for those of the model."""


@dataclass(frozen=True)
class Sublayers:
    """A layer's parts: something that mixes tokens, something that mixes channels, or both in this order."""

    attends: bool = False
    """True if it has the model's attention."""

    linear: str | None = None
    """Name of its mixer, in place of the module of the model's attention."""

    mlp: bool = False
    """True if it has an MLP, dense or of experts."""

    experts: bool = False
    """True if its MLP is a mixture of experts."""

    @property
    def mixes(self) -> bool:
        """True if it mixes tokens."""
        return self.attends or self.linear is not None


@dataclass(frozen=True)
class LayerKind(Sublayers):
    """Properties in which the layers of a model may differ."""

    span: Span = Span()
    """Tokens that its attention sees, if it has the model's."""

    rotation: Rotation | None = None
    """The rotary embedding of its queries and keys; None for none, as in layers without the model's attention."""

    own: tuple[tuple[str, object], ...] = ()
    """Fields of the configuration that have another value in this layer than in the model, each with that value."""

    tempered: bool = False
    """True if its queries are scaled by their positions (--attention-temperature-coeff)."""


class LayerPattern:
    """Base of a section of flags that may state the sublayers of each layer, in place of the flags of the model."""

    @property
    def states_layers(self) -> bool:
        """True if its flags are given."""
        return False

    def stated_layers(self, config: Section) -> tuple[Sublayers, ...]:
        """Sublayers of each layer and of each multi-token prediction module of a `TransformerConfig`.

        Raises ValueError for a pattern that is not legal."""
        raise NotImplementedError


MOST_LAYERS = 10**6
"""Entries that a list may have while it is evaluated."""


def layer_pattern(text: str, num_layers: int, of_period: Callable[[int, int], bool]) -> tuple[bool, ...]:
    """Parse a pattern of layers to one bool per layer: a period N, which `of_period(layer, N)` applies, or a list of 0
    and 1 such as "([0]*3+[1]*58)". Raises ValueError if the text is not legal."""
    value = _value_of(text, "is neither a number nor a list of 0 and 1")
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{value} must be above 0")
        return tuple(of_period(layer, value) for layer in range(num_layers))
    return tuple(item == 1 for item in _for_each_layer(value, num_layers, "a 0 or 1", lambda item: item in (0, 1)))


def layer_numbers(text: str, num_layers: int | None, least: int = 1) -> tuple[int, ...]:
    """Parses a list of numbers above 0, or from 0 on if that is `least`, one for each layer, such as "([64]*3+[96]*9)";
    any number of them without `num_layers`. Raises ValueError if the text is not legal."""
    value = _value_of(text, "is not a list of numbers")
    if isinstance(value, int):
        raise ValueError(f"{value} must be a list with a number for each of {num_layers or 'the'} layers")
    what = "a number above 0" if least else "a number, at least 0,"
    count = len(value) if num_layers is None else num_layers
    return _for_each_layer(value, count, what, lambda item: item >= least)


def each(layer: int, period: int) -> bool:
    """Layers 0, N, 2N, ..."""
    return layer % period == 0


def last_of_each(layer: int, period: int) -> bool:
    """Layers N - 1, 2N - 1, ..."""
    return layer % period == period - 1


def all_but_last_of_each(layer: int, period: int) -> bool:
    """N - 1 layers of N."""
    return not last_of_each(layer, period)


def _value_of(text: str, otherwise: str) -> int | list[int]:
    """Evaluates a text. Raises ValueError with `otherwise`, such as "is not a list of numbers", if it says neither a
    number nor a list."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, UnicodeEncodeError):
        raise ValueError(f"{text!r} {otherwise}") from None


def _for_each_layer(value: list[int], num_layers: int, what: str, is_legal: Callable[[int], bool]) -> tuple[int, ...]:
    """Returns a list that has one legal entry for each layer. Raises ValueError, with `what` an entry must be, if it
    has not."""
    if len(value) != num_layers:
        raise ValueError(f"the list must have {what} for each of {num_layers} layers, and has {len(value)} entries")
    for layer, item in enumerate(value):
        if not is_legal(item):
            raise ValueError(f"the list must have {what} for each layer, and has {item} for layer {layer}")
    return tuple(value)


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluates whole numbers, lists of them, sums of lists, and a list times a number. Raises TypeError for anything
    else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.List | ast.Tuple):
        return [_number(element) for element in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Add):
            if isinstance(left, list) and isinstance(right, list):
                return left + right
        elif isinstance(left, list) and isinstance(right, int):
            return _repeated(left, right)
        elif isinstance(left, int) and isinstance(right, list):
            return _repeated(right, left)
    raise TypeError(node)


def _repeated(items: list[int], times: int) -> list[int]:
    if len(items) * times > MOST_LAYERS:
        raise TypeError(f"{len(items)} entries {times} times")
    return items * times


def _number(node: ast.expr) -> int:
    value = _evaluate(node)
    if isinstance(value, list):
        raise TypeError(node)
    return value
