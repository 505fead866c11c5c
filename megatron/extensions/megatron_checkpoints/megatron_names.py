"""Names of parameters in Megatron-LM's checkpoints, and where each of ours lies in those of torch_dist.

Layers of equal kind are stacked along a new first dim under one name, or each has its own. Each tensor of theirs is one
of ours in another shape: query groups, heads and channels are one dim there, and so are gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megatron.core.param_meta import ParamMeta

EXTRA_STATE = "_extra_state"
"""Ends the names of what Transformer Engine keeps for fp8."""

LAYERS = "decoder.layers."

FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
}
"""A norm of ours -> the beginning of its names where it is fused with the linear layer behind it."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """A tensor of theirs, or one entry of it along the first dim."""

    key: str
    layer: int | None = None


@dataclass(frozen=True)
class Place:
    """Where one of our parameters lies: parts that are concatenated, in order, and reshaped to its shape."""

    meta: ParamMeta
    parts: tuple[Part, ...]


def find_places(metas: Mapping[str, ParamMeta], shapes: Shapes, num_layers: int) -> dict[str, Place]:
    """The place of each parameter. Raises ValueError for all that is missing, unknown or of another shape.

    `shapes`: those of all tensors of the model in the checkpoint, by name.
    """
    places, problems, used = {}, [], set[str]()
    for name, meta in metas.items():
        found = next((parts for parts in _candidates(meta) if all(part.key in shapes for part in parts)), None)
        if found is None:
            problems.append(f"{name} is missing")
            continue
        used |= {part.key for parts in _candidates(meta) for part in parts}
        places[name] = Place(meta, found)
        problems += _misfits(meta, found, shapes, num_layers)
    problems += [f"{key} is unknown" for key in shapes if key not in used and not is_skipped(key)]
    if problems:
        raise ValueError(few(problems))
    return places


def few(problems: Sequence[str]) -> str:
    """The first problems in one line, with the number of the others."""
    return "; ".join(problems[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")


def is_skipped(key: str) -> bool:
    """Whether a tensor of theirs is none of the model: buffers, and what is kept for fp8."""
    return key.endswith(EXTRA_STATE) or "rotary_pos_emb.inv_freq" in key or key.endswith("local_tokens_per_expert")


def _misfits(meta: ParamMeta, parts: tuple[Part, ...], shapes: Shapes, num_layers: int) -> Iterator[str]:
    expected = their_shape(meta)
    for part in parts:
        shape, stacked = shapes[part.key], () if part.layer is None else (num_layers,)
        if len(parts) == 1:
            wanted = (*stacked, *expected)
            if shape != wanted:
                yield f"{part.key} has shape {list(shape)}, not {list(wanted)}"
        elif prod(shape) * len(parts) != meta.numel or shape[-1:] != expected[-1:]:
            yield f"{part.key} has shape {list(shape)}, one of {len(parts)} parts of {list(expected)}"


def their_shape(meta: ParamMeta) -> tuple[int, ...]:
    """Shape of a parameter of one layer in their checkpoints."""
    shape = meta.global_shape
    if meta.expert:
        return (shape[0], prod(shape[1:-1]), shape[-1])
    if meta.name.endswith("bias") or not meta.matrix:
        return (prod(shape),)
    return (prod(shape[:-1]), shape[-1])


def names_in(name: str, stacked: bool, moe_layers: Sequence[int]) -> tuple[list[str], int | None]:
    """The names under which megatron-core looks for a parameter of ours, and its place in the stack if there is one.

    A norm is fused with the linear layer behind it. In front of experts it has two names: with Transformer Engine its
    own, and without it that of a fused one.
    """
    if not name.startswith(LAYERS):
        return [name], None
    number, inside = name.removeprefix(LAYERS).split(".", 1)
    both = inside.startswith("pre_mlp_layernorm.") and int(number) in moe_layers
    suffixes = list(_suffixes(inside))[: 2 if both else 1]
    front = LAYERS if stacked else f"{LAYERS}{number}."
    return [front + suffix for suffix in suffixes], int(number) if stacked else None


def names_inside(name: str) -> Iterator[str]:
    """Every name, with the number of the layer, that a dense parameter of ours may have in one rank's module."""
    if not name.startswith(LAYERS):
        yield name
        return
    number, inside = name.removeprefix(LAYERS).split(".", 1)
    yield from (f"{LAYERS}{number}.{suffix}" for suffix in _suffixes(inside))


OLD_NAMES = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^(module\.)+", ""),
        (r"^(language_model\.embedding|embedding)\.", "embedding."),
        (r"^language_model\.(encoder|transformer|decoder)\.", "decoder."),
        (r"^(language_model\.output_layer|word_embeddings_for_head)\.", "output_layer."),
        (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
        (r"^(decoder\.layers\.\d+\.)attention\.", r"\1self_attention."),
        (r"^(decoder\.layers\.\d+\.)input_norm\.", r"\1input_layernorm."),
        (r"^(decoder\.layers\.\d+\.)post_attention_(layer)?norm\.", r"\1pre_mlp_layernorm."),
        (r"\.self_attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
    )
)
"""Names of Megatron-LM before its core -> those of its core."""


def current_name(name: str) -> str:
    """The name that a tensor of an older model has today."""
    for old, new in OLD_NAMES:
        name = old.sub(new, name)
    return name


def _candidates(meta: ParamMeta) -> Iterator[tuple[Part, ...]]:
    """Every way in which a parameter may be stored."""
    if not meta.name.startswith(LAYERS):
        yield (Part(meta.name),)
        return
    number, inside = meta.name.removeprefix(LAYERS).split(".", 1)
    for suffix in _suffixes(inside):
        yield (Part(f"{LAYERS}{suffix}", int(number)),)
        own = f"{LAYERS}{number}.{suffix}"
        yield (Part(own),)
        yield (Part(f"{own}_w"), Part(f"{own}_v"))
        if meta.expert:
            yield from _single_experts(meta.global_shape[0], f"{LAYERS}{number}.{suffix}")


def _single_experts(count: int, name: str) -> Iterator[tuple[Part, ...]]:
    """Experts under names of their own, whole or with gate (w) and up (v) apart."""
    each = [name.replace(".experts.experts.", f".experts.experts.{expert}.") for expert in range(count)]
    yield tuple(Part(expert) for expert in each)
    yield tuple(Part(f"{expert}_{half}") for expert in each for half in "wv")


def _suffixes(inside: str) -> Iterator[str]:
    """Names of a layer's parameter in their layer: `mlp.router.weight` of `decoder.layers.3.mlp.router.weight`."""
    module, _, kind = inside.rpartition(".")
    if module in FUSED_NORMS:
        yield FUSED_NORMS[module] + kind
    if module == "self_attention.core":
        inside = f"self_attention.core_attention.{kind}"
    if module.startswith("mlp.experts."):
        inside = inside.replace("mlp.experts.", "mlp.experts.experts.", 1)
    yield inside
