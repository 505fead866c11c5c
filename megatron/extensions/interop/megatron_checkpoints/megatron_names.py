"""Names of parameters in Megatron-LM's checkpoints, and the place of each of ours in those of torch_dist.

Layers of equal kind are stacked along a new first dim under one name, or each has its own. Each tensor of theirs is one
of ours in another shape: query groups, heads and channels are one dim there, and so are gate and up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from megatron.core.param_meta import ParamMeta
from megatron.extensions.interop.conversion.formats import few

EXTRA_STATE = "_extra_state"
"""Ends the names of what Transformer Engine keeps for fp8."""

LAYERS = "decoder.layers."

FUSED_NORMS = {
    "input_layernorm": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
}
"""A norm of ours -> the beginning of its names where it is fused with the linear layer behind it."""


@dataclass(frozen=True)
class Way:
    """A way to store a parameter, or one rank's box of it: names of tensors, which it consists of in order.

    `shape`: that of each, in files of one rank. `layer`: the entry along their first dim. `transposed`: all experts are
    in one tensor, viewed as [experts, input channels, output channels].
    """

    names: tuple[str, ...]
    shape: tuple[int, ...] = ()
    layer: int | None = None
    transposed: bool = False


def find_ways(
    metas: Mapping[str, ParamMeta],
    ways_of: Callable[[ParamMeta], Iterable[Way]],
    present: Collection[str],
    misfits: Callable[[ParamMeta, Way], Iterable[str]],
    used: Iterable[str] = (),
) -> dict[str, Way]:
    """The first way of each parameter whose tensors are all present. Raises ValueError for all that is missing, of
    another shape, or unknown: present and in no way, and not `used` either."""
    found = dict[str, Way]()
    problems = []
    known = set(used)
    for name, meta in metas.items():
        ways = list(ways_of(meta))
        way = next((way for way in ways if all(each in present for each in way.names)), None)
        if way is None:
            problems.append(f"{name} is missing")
            continue
        known |= {each for way in ways for each in way.names}
        found[name] = way
        problems += misfits(meta, way)
    problems += [f"{name} is unknown" for name in sorted({*present} - known) if not is_skipped(name)]
    if problems:
        raise ValueError(few(problems, 6))
    return found


def is_skipped(key: str) -> bool:
    """Return whether a tensor of theirs is none of the model: buffers, and what is kept for fp8."""
    return key.endswith(EXTRA_STATE) or "rotary_pos_emb.inv_freq" in key or key.endswith("local_tokens_per_expert")


def stacked_misfits(shapes: Mapping[str, tuple[int, ...]], num_layers: int, meta: ParamMeta, way: Way) -> Iterator[str]:
    """Problems of the shapes of a parameter's tensors in torch_dist."""
    expected, count = their_shape(meta), len(way.names)
    for name in way.names:
        shape = shapes[name]
        if count == 1:
            wanted = (*(() if way.layer is None else (num_layers,)), *expected)
            if shape != wanted:
                yield f"{name} has shape {list(shape)}, not {list(wanted)}"
        elif prod(shape) * count != meta.numel or shape[-1:] != expected[-1:]:
            yield f"{name} has shape {list(shape)}, one of {count} parts of {list(expected)}"


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


def stacked_ways(meta: ParamMeta) -> Iterator[Way]:
    """Every way in which torch_dist may store a parameter."""
    if not meta.name.startswith(LAYERS):
        yield Way((meta.name,))
        return
    number, inside = meta.name.removeprefix(LAYERS).split(".", 1)
    for suffix in _suffixes(inside):
        yield Way((f"{LAYERS}{suffix}",), layer=int(number))
        own = f"{LAYERS}{number}.{suffix}"
        yield Way((own,))
        yield Way((f"{own}_w", f"{own}_v"))
        if meta.expert:  # under names of their own, whole or with gate (w) and up (v) apart
            experts = range(meta.global_shape[0])
            each = [own.replace(".experts.experts.", f".experts.experts.{expert}.") for expert in experts]
            yield Way(tuple(each))
            yield Way(tuple(f"{expert}_{half}" for expert in each for half in "wv"))


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
