"""Interfaces of layers and residual streams, the kinds of layers in a model, and the parser of layer-pattern flags.
This module does not import torch.

@LAYERS.register("my_layer")
class MyLayer(TransformerLayer):
    def forward(self, x: Tensor, context: BatchContext) -> Tensor: ...
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar

from megatron.core.config.flag_spec import Section
from megatron.core.registry import NoFacts, Registry

if TYPE_CHECKING:
    from torch import Tensor, nn

ContextT = TypeVar("ContextT")


class LayerModule(Protocol):
    """Interface of a layer, which is an `nn.Module`."""

    def forward(self, x: Tensor, context: object, /) -> Tensor:
        """Map the residual stream before the layer to the stream after the layer: x [s, b, w] -> [s, b, w]. Sequence
        parallelism divides s by tp, and context parallelism divides s by cp. w is the width of the residual stream:
        --hidden-size, or a multiple of --hidden-size if the model has several parallel residual streams. `context` is
        the micro-batch's `megatron.core.batch.BatchContext`."""


class Layer(Protocol):
    """Class or function that creates one layer. Custom layers can derive from
    `megatron.core.transformer.layer.TransformerLayer`, whose `build_mlp` creates the MLP of layers without experts."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Create the layer. `name` is the prefix of the parameter names, `config` is the layer's `TransformerConfig`,
        and `ctx` is the layer's `megatron.core.tensor_parallel.layers.TPContext`. `ctx.layer` is the layer number."""


LAYERS = Registry("--layer-module", NoFacts, protocol=Layer, makes=LayerModule)
"""Registry that maps each choice of --layer-module to a `Layer`."""

LAYERS.register("transformer_layer", "megatron.core.transformer.layer:TransformerLayer")


@dataclass(frozen=True)
class ResidualFacts:
    """Properties of a residual stream. The functions among the fields receive the model's configuration, a
    `megatron.core.config.model.TransformerConfig`."""

    switch: str
    """Flag that selects this residual stream. A model can have only one residual stream: the rule `residual_streams` in
    `megatron/training/config/rules/model.py` rejects a second one."""

    when: Callable[..., bool]
    """Predicate that decides whether the model has this residual stream."""

    width: Callable[..., int] = attrgetter("hidden_size")
    """Function that returns the width, in channels, of the residual stream between layers and of the tensors that
    pipeline stages send to each other."""

    layers: tuple[str, ...] | None = ("transformer_layer",)
    """Values of --layer-module that this residual stream supports. The layers of these modules add the outputs of their
    sublayers to the stream. None if the residual stream supports all values of --layer-module."""

    recomputed: str = ""
    """Name by which --recompute-modules selects the part of this stream that can be recomputed; empty if no part of the
    stream can be recomputed."""

    experts_apart: bool = False
    """True if the stream receives the output of the shared expert and the output of the routed experts separately."""


class ResidualModule(Protocol):
    """An `nn.Module` that connects one sublayer to the residual stream."""

    def forward(self, x: Tensor, sublayer: Callable[[Tensor, ContextT], Tensor], context: ContextT, /) -> Tensor:
        """Call the sublayer with hidden states [s, b, h], which are computed from the stream x [s, b, w]. Add the
        output of the sublayer to the stream. The method returns the new stream [s, b, w]. Under sequence parallelism,
        s/tp replaces s."""


class ResidualClass(Protocol):
    """Interface of a class that implements a residual stream other than the plain sum of hidden states and sublayer
    outputs."""

    def __call__(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Create the module that connects one sublayer to the stream. `name` is the name of the sublayer, `config` is
        the layer's `TransformerConfig`, and `ctx` is the layer's `megatron.core.tensor_parallel.layers.TPContext`."""

    def enter(self, x: Tensor, config: Section) -> Tensor:
        """Convert hidden states to a residual stream: x [s, b, h] -> [s, b, w]. This method must be static."""

    def leave(self, name: str, config: Section, ctx: object) -> nn.Module:
        """Build the module that converts the stream after the last layer to hidden states, [s, b, w] -> [s, b, h].

        `name` is the parameter prefix of the norm that follows this module. This method must be static.
        """


RESIDUALS = Registry("residual stream", ResidualFacts, protocol=ResidualClass, makes=ResidualModule)
"""Registry that maps the name of a residual stream to its `ResidualClass`. Only extensions register residual
streams."""


@dataclass(frozen=True)
class Span:
    """Set of tokens to which a token attends: the token itself and, by default, all earlier tokens of its document."""

    window: int | None = None
    """Number of most recent tokens that are visible, including the token itself; None if there is no window."""

    chunk: int | None = None
    """Chunk length in tokens: documents are cut into chunks, and tokens attend only within their chunk (Llama 4). None
    if documents are not cut into chunks."""

    def mean(self, length: int) -> float:
        """Return the mean number of tokens to which a token attends in a document of s = `length` tokens. Without a
        window or chunks, the mean is approximated as s/2. With a window of w tokens, the mean is w - w^2 / 2s."""
        if self.chunk is not None and self.chunk < length:
            whole, rest = divmod(length, self.chunk)
            return (whole * self.chunk**2 + rest**2) / (2 * length)
        w = min(self.window or length, length)
        return w * (1 - w / (2 * length))

    def hides(self, length: int) -> bool:
        """Return True if some token in a document of `length` tokens cannot attend to all earlier tokens of the
        document."""
        return any(limit is not None and limit < length for limit in (self.window, self.chunk))


@dataclass(frozen=True)
class Rotation:
    """Parameters of one of the model's rotary embeddings."""

    base: float
    scaled: bool = True
    """True if the model's frequency scaling and position interpolation apply to this embedding."""

    percent: float = 1.0
    """Fraction of each head's channels that are rotated."""

    channels: int | None = None
    """Number of channels per head in the layers that use this embedding; None if it is the model's head width."""


@dataclass(frozen=True)
class Sublayers:
    """Sublayers of one layer: a token mixer, an MLP, or both in this order."""

    attends: bool = False
    """True if the layer contains the model's attention."""

    linear: str | None = None
    """Name of the mixer that replaces the model's attention; None if no mixer replaces it."""

    mlp: bool = False
    """True if the layer contains an MLP, either dense or with experts."""

    experts: bool = False
    """True if the layer's MLP is a mixture of experts."""

    @property
    def mixes(self) -> bool:
        """True if the layer contains attention or another token mixer."""
        return self.attends or self.linear is not None


@dataclass(frozen=True)
class LayerKind(Sublayers):
    """Properties in which the layers of a model may differ."""

    span: Span = Span()
    """Tokens that are visible to the layer's attention. The value has no meaning if the layer does not contain the
    model's attention."""

    rotation: Rotation | None = None
    """Rotary embedding of the layer's queries and keys; None if queries and keys are not rotated, or if the layer has
    a mixer other than attention."""

    own: tuple[tuple[str, object], ...] = ()
    """Pairs (field, value) of the configuration fields whose value in this layer differs from the model's value."""

    tempered: bool = False
    """True if the layer scales its queries by a factor that depends on their positions
    (--attention-temperature-coeff)."""


class LayerPattern:
    """Base class of a section of flags that may specify the sublayers of each layer. The flags of such a section
    override the model's other flags."""

    @property
    def states_layers(self) -> bool:
        """True if the flags of this section are given, so that they determine the layers."""
        return False

    def stated_layers(self, config: Section) -> tuple[Sublayers, ...]:
        """Return the sublayers of each layer and of each multi-token prediction module. `config` is the model's
        `TransformerConfig`.

        The method raises ValueError if the pattern is invalid."""
        raise NotImplementedError


MOST_LAYERS = 10**6
"""Maximum number of entries of any list that the evaluation of a layer pattern may create."""


def layer_pattern(text: str, num_layers: int, of_period: Callable[[int, int], bool]) -> tuple[bool, ...]:
    """Parse the text of a layer pattern, and return one bool per layer.

    The pattern is either a period N or a list of 0 and 1 such as "([0]*3+[1]*58)". If it is a period, `of_period(layer,
    N)` returns the value of each layer. The function raises ValueError if the text is invalid.
    """
    value = _value_of(text, "is neither a number nor a list of 0 and 1")
    if isinstance(value, int):
        if value < 1:
            raise ValueError(f"{value} must be above 0")
        return tuple(of_period(layer, value) for layer in range(num_layers))
    return tuple(item == 1 for item in _for_each_layer(value, num_layers, "a 0 or 1", lambda item: item in (0, 1)))


def layer_numbers(text: str, num_layers: int | None, least: int = 1) -> tuple[int, ...]:
    """Parse a list of numbers, one for each layer, such as "([64]*3+[96]*9)".

    The numbers in the list must be at least `least`. If `num_layers` is None, the list may have any length. The
    function raises ValueError if the text is invalid.
    """
    value = _value_of(text, "is not a list of numbers")
    if isinstance(value, int):
        raise ValueError(f"{value} must be a list with a number for each of {num_layers or 'the'} layers")
    what = "a number above 0" if least else "a number, at least 0,"
    count = len(value) if num_layers is None else num_layers
    return _for_each_layer(value, count, what, lambda item: item >= least)


def each(layer: int, period: int) -> bool:
    """Return True for layers 0, N, 2N, ..., where N is `period`."""
    return layer % period == 0


def last_of_each(layer: int, period: int) -> bool:
    """Return True for layers N - 1, 2N - 1, ..., where N is `period`."""
    return layer % period == period - 1


def all_but_last_of_each(layer: int, period: int) -> bool:
    """Return True for the first N - 1 of every N layers, where N is `period`."""
    return not last_of_each(layer, period)


def _value_of(text: str, otherwise: str) -> int | list[int]:
    """Convert a text such as "4" or "([0]*3+[1])*2" to a number or a list of numbers. Raise ValueError if the text
    describes neither a number nor a list. The error message is the text followed by `otherwise`, such as "is not a list
    of numbers"."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, UnicodeEncodeError):
        raise ValueError(f"{text!r} {otherwise}") from None


def _for_each_layer(value: list[int], num_layers: int, what: str, is_legal: Callable[[int], bool]) -> tuple[int, ...]:
    """Return the list `value` as a tuple. If the list does not have one valid entry for each layer, raise ValueError
    with a message that describes a valid entry as `what`."""
    if len(value) != num_layers:
        raise ValueError(f"the list must have {what} for each of {num_layers} layers, but has {len(value)} entries")
    for layer, item in enumerate(value):
        if not is_legal(item):
            raise ValueError(f"the list must have {what} for each layer, but has {item} for layer {layer}")
    return tuple(value)


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluate a syntax tree of integers, lists of integers, sums of lists, and products of a list and an integer. The
    function raises TypeError if the tree contains any other expression."""
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
