"""Differences between the layers of a model, and the patterns of flags that state them. No torch."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from megatron.core.config.flag_spec import flag
from megatron.core.config.layer_kind import LayerKind, Span, Sublayers
from megatron.core.config.mixers import MIXERS
from megatron.core.parts import RECOMPUTED_PARTS


@dataclass(frozen=True)
class RecomputeConfig:
    """Recomputation: activations that the backward pass computes again instead of saving them."""

    recompute_granularity: str = flag(
        "none",
        choices=("none", "selective", "full"),
        without_effect=True,
        training_only=True,
        first_run=True,
    )
    """Recompute nothing (none), parts of each layer (selective) or whole layers (full) in the backward pass."""

    recompute_method: str | None = flag(
        None,
        choices=("uniform", "block"),
        no_effect_without="--recompute-granularity full",
        without_effect=True,
        training_only=True,
    )
    """Full recomputation: all layers in groups (uniform), or only the first layers of a stage (block)."""

    recompute_num_layers: int | None = flag(
        None, no_effect_without="--recompute-granularity full", without_effect=True, training_only=True
    )
    """Full recomputation: layers in a group (uniform), or layers recomputed in each stage (block)."""

    recompute_modules: tuple[str, ...] | None = flag(
        None,
        many=True,
        choices=RECOMPUTED_PARTS,
        no_effect_without="--recompute-granularity selective",
        without_effect=True,
        training_only=True,
    )
    """Selective recomputation: parts of each layer; default core_attn. core_attn is attention without its
    projections, layernorm both norms. In layers without experts, mlp is the whole MLP, mlp_act its activation function.
    In layers with experts, moe is the whole MoE layer, moe_act the activation functions of all experts, shared_experts
    the shared expert."""

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Parts of each layer that selective recomputation computes again."""
        return self.recompute_modules or ("core_attn",) if self.recompute_granularity == "selective" else ()

    def recomputes(self, module: str) -> bool:
        """Whether selective recomputation computes `module` again, and not a larger one that includes it."""
        named = self.recomputed_modules
        return module in named and RECOMPUTED_PARTS.facts(module).within not in named


MOST_LAYERS = 10**6
"""Entries that a list may have while it is evaluated."""


def layer_pattern(text: str, num_layers: int, of_period: Callable[[int, int], bool]) -> tuple[bool, ...]:
    """Parses a pattern of layers to one bool per layer: a period N, which `of_period(layer, N)` applies, or a list of
    0 and 1 such as "([0]*3+[1]*58)". Raises ValueError if the text is not legal."""
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
    """The number or list that a text says. ValueError that says what it is `otherwise`."""
    try:
        return _evaluate(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, TypeError, RecursionError, UnicodeEncodeError):
        raise ValueError(f"{text!r} {otherwise}") from None


def _for_each_layer(value: list[int], num_layers: int, what: str, is_legal: Callable[[int], bool]) -> tuple[int, ...]:
    """A list that must have an entry for each layer, `what` is legal."""
    if len(value) != num_layers:
        raise ValueError(f"the list must have {what} for each of {num_layers} layers, and has {len(value)} entries")
    for layer, item in enumerate(value):
        if not is_legal(item):
            raise ValueError(f"the list must have {what} for each layer, and has {item} for layer {layer}")
    return tuple(value)


def _evaluate(node: ast.expr) -> int | list[int]:
    """Evaluates whole numbers, lists of them, and + and * of both."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _evaluate(node.operand)
        if isinstance(value, int):
            return -value
    if isinstance(node, ast.List | ast.Tuple):
        return [item for element in node.elts for item in _items(element)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if isinstance(node.op, ast.Mult) and isinstance(left, int) != isinstance(right, int):
            length, times = (len(left), right) if isinstance(left, list) else (len(right), left)  # type: ignore[arg-type]
            if length * times > MOST_LAYERS:  # type: ignore[operator]
                raise TypeError(node)
            return left * right  # type: ignore[operator]
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
    raise TypeError(node)


def _items(node: ast.expr) -> list[int]:
    value = _evaluate(node)
    if isinstance(value, list):
        raise TypeError(node)
    return [value]


def with_attention(variant: str | None, *mlp: bool) -> Sublayers:
    """A layer with the model's attention or a variant, and the MLP that the last fields of `Sublayers` state."""
    return Sublayers(variant is None or MIXERS.facts(variant).attends, variant, *mlp)


@lru_cache(maxsize=64)
def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """Kinds of all layers, followed by those of the modules of multi-token prediction: these have the sublayers and the
    width of the last layer, but see and rotate by their own numbers unless --mtp-layer-kind says otherwise."""
    depths, by_number = range(config.mtp_depths), config.mtp_layer_kind == "own_number"

    def as_last(pattern: tuple[Any, ...]) -> tuple[Any, ...]:
        return pattern + pattern[-1:] * len(depths)

    def numbered(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
        return (*pattern, *(pattern[k % len(pattern)] for k in depths)) if pattern and by_number else as_last(pattern)

    sublayers = config.stated_layers
    if sublayers is None:
        whole = zip(config.expert_pattern, config.linear_pattern, strict=True)
        variant = config.experimental_attention_variant
        sublayers = as_last(
            tuple(with_attention(variant if linear else None, True, experts) for experts, linear in whole)
        )
    kinds = (
        LayerKind(**vars(parts), own=_own_width(config, parts, ffn))
        if not parts.attends
        else LayerKind(
            **vars(parts),
            span=config.local_span if local else Span(),
            rotation=(config.local_rotation if local else config.rotation) if rotated else None,
            own=(*(config.local_own if local else ()), *_own_width(config, parts, ffn)),
            tempered=config.attention_temperature_coeff > 0
            and (config.attention_temperature_everywhere or not rotated),
        )
        for parts, local, rotated, ffn in zip(
            sublayers,
            numbered(config.local_pattern),
            numbered(config.rope_pattern),
            as_last(config.ffn_sizes),
            strict=True,
        )
    )

    def with_mixer(kind: LayerKind, number: int) -> LayerKind:
        return MIXERS.facts(kind.linear).of_layer(config, number, kind) if kind.linear else kind

    return tuple(with_mixer(kind, number) for number, kind in enumerate(kinds))


def _own_width(config: Any, parts: Sublayers, ffn: int) -> tuple[tuple[str, object], ...]:
    """The width of a layer's MLP where it is not the model's."""
    return () if parts.experts or not parts.mlp or ffn == config.ffn_size else (("ffn_hidden_size", ffn),)
