"""Functions that determine from a config.json which layers have linear attention, sliding windows, chunked attention,
experts or rotary embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from typing import get_args, get_origin

from megatron.extensions.interop.hugging_face.config_json.config_values import (
    Fields,
    Values,
    entries,
    number,
    text,
    whole,
)
from megatron.extensions.interop.hugging_face.families import Family
from megatron.extensions.layers.hybrid_layers.flags import DENSE, EXPERTS

FULL = "full_attention"
LOCAL = "sliding_attention"
CHUNKED = "chunked_attention"
LINEAR = "linear_attention"
"""Value of layer_types in config.json for a layer with linear attention."""

LETTERS = {LINEAR: "M", "mamba": "M", FULL: "*", "attention": "*", "mlp": DENSE, "moe": EXPERTS}
"""Maps each layer kind in `layers_block_type` of config.json to its letter in --hybrid-layer-pattern."""


def broken_rule(value: object, hint: object) -> str | None:
    """Return the rule that a value in config.json violates. Return None if the value is valid. Sizes must be positive,
    and other numbers must be at least 0."""
    kinds = get_args(hint) or (hint,)
    if value is None:
        return None if type(None) in kinds else "a number"
    for many in (kind for kind in kinds if get_origin(kind) is tuple):
        legal = isinstance(value, list) and not any(broken_rule(each, get_args(many)[0]) for each in value)
        return None if legal else "a list of numbers, at least 0"
    if int in kinds:
        return None if type(value) is int and value > 0 else "a whole number above 0"
    if float in kinds:
        legal = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
        return None if legal else "a number, at least 0"
    return None if type(value) in kinds else f"a {getattr(kinds[0], '__name__', kinds[0])}"


def count(values: Values, key: str) -> int:
    """Return the value of a key, which must be a positive integer. Raises ValueError if the value is anything else."""
    value = values.get(key)
    if type(value) is not int or value <= 0:
        raise ValueError(f"config.json: {key} = {value!r} must be {broken_rule(value, int)}")
    return value


def pattern_from_hf(hf: Values) -> Fields:
    """Return the TransformerConfig fields for the number of layers and for the layer pattern. The pattern uses
    Megatron-LM's letters. Older config.json files contain the letters, and newer files list the layer kinds."""
    if hf.get("layers_block_type") is None:
        letters = [*text(hf, "hybrid_override_pattern")]
    else:
        letters = [LETTERS.get(str(kind), str(kind)) for kind in entries(hf, "layers_block_type")]
    if unknown := {*letters} - {*LETTERS.values()}:
        raise ValueError(f"config.json: layers {', '.join(map(repr, sorted(unknown)))} are not supported")
    return {"hybrid_override_pattern": "".join(letters), "num_hidden_layers": len(letters)}


def usual_kinds(family: Family, layers: int) -> list[str]:
    """Return the kind of each layer for a config.json that does not list the kinds. The sequence `family.layer_types`
    is repeated until all layers have a kind."""
    kinds = [kind for kind, _ in zip(cycle(family.layer_types), range(layers), strict=False)]
    kinds[: len(family.first_layer_types)] = family.first_layer_types[:layers]
    if family.last_layer_type:
        kinds[-1] = family.last_layer_type
    if family.needed_layer_type and family.needed_layer_type not in kinds:
        kinds[-1] = family.needed_layer_type
    return kinds


def linear_layers(hf: Values, family: Family) -> list[bool]:
    """Return a list with one bool per layer: True if the layer has linear attention. A config.json either lists the
    layer kinds, in layer_types or under an older key, or states that every N-th layer has full attention."""
    legacy = {"mamba": LINEAR, "conv": LINEAR, "attention": FULL}
    listed = [legacy.get(str(each), each) for each in entries(hf, "layer_types")]
    counted = entries(hf, "linear_attn_config.kda_layers")  # 1-based
    if not listed and counted:
        listed = [LINEAR if layer + 1 in counted else FULL for layer in range(whole(hf, "num_hidden_layers"))]

    def usual(layer: int) -> bool:
        if family.layer_types:
            return usual_kinds(family, whole(hf, "num_hidden_layers"))[layer] == LINEAR
        if hf.get("attn_layer_indices") is not None:
            return layer not in entries(hf, "attn_layer_indices")
        return not hf["full_attention_interval"] or (layer + 1) % whole(hf, "full_attention_interval") != 0

    return listed_layers({**hf, "layer_types": listed}, "layer_types", (FULL, LINEAR), usual)


def periodic(hf: Values, of: str) -> list[bool]:
    """Return a list of one bool per layer. The entries `offset`, `offset` + `period`, `offset` + 2 * `period` and so on
    are True. This rule is used by Jamba."""
    period, offset = count(hf, f"{of}_layer_period"), hf[f"{of}_layer_offset"]
    return [layer % period == offset for layer in range(whole(hf, "num_hidden_layers"))]


def window_from_hf(hf: Values, family: Family) -> Fields:
    """Return the TransformerConfig fields for the size of the sliding window and for the layers that use the window."""
    window = hf.get("sliding_window")
    if family.earlier_tokens and hf.get(family.earlier_tokens) is not None:
        window = whole(hf, family.earlier_tokens) + 1
    if window is None or not hf.get("use_sliding_window", True):
        return {"window_size": None}
    window = count({"sliding_window": window}, "sliding_window")
    local = windows(hf, family)
    if not any(local):
        return {"window_size": None}
    return {"window_size": window, "window_attn_skip_freq": pattern_text(local, usual=True)}


def windows(hf: Values, family: Family) -> list[bool]:
    """Return a list with one bool per layer: True if the layer has a sliding window. A config.json either lists the
    layer kinds in layer_types, or states that every N-th layer has full attention."""
    has_first = "max_window_layers" in hf and hf.keys() & {"use_sliding_window", "sliding_window_pattern"}
    first = number(hf, "max_window_layers") if has_first else 0
    period = number(hf, "sliding_window_pattern") if hf.get("sliding_window_pattern") else 0
    rotated = rotated_layers(hf) if "no_rope_layers" in family.defaults and not hf.get("layer_types") else None

    def usual(layer: int) -> bool:
        if family.layer_types:
            within = family.windows_below is None or layer < number(hf, family.windows_below)
            return within and usual_kinds(family, whole(hf, "num_hidden_layers"))[layer] == LOCAL
        if rotated is not None:
            return not rotated[layer]
        return layer >= first and not (period and not (layer + 1) % period)

    if "attention_types" in family.defaults:
        kinds = repeated(entries(hf, "attention_types"), whole(hf, "num_hidden_layers") + 1)
        return listed_layers({**hf, "attention_types": kinds}, "attention_types", ("global", "local"))
    return listed_layers(hf, "layer_types", (FULL, LOCAL), usual)


def repeated(groups: Iterable[object], most: int) -> list[object]:
    """Expand pairs [kinds, times] by repeating `kinds` `times` times, and return the first `most` layer kinds. For
    example, [[["global", "local"], 2]] is expanded to global, local, global, local. `times` comes from an untrusted
    file and may be huge."""
    return list(islice(_repeated(groups), most))


def _repeated(groups: Iterable[object]) -> Iterator[object]:
    for group in groups:
        if not isinstance(group, (list, tuple)):
            raise TypeError(f"{str(group)[:80]!r} must be a list of kinds, followed by the number of repetitions")
        kinds, times = group
        for _ in range(times if kinds else 0):
            yield from kinds


def listed_layers(
    hf: Values, key: str, kinds: tuple[object, object], usual: Callable[[int], object] = lambda layer: True
) -> list[bool]:
    """Return a list with one bool per layer: True if the layer has the second of the two kinds in `kinds`.

    Args:
        hf: Values of config.json.
        key: Key that lists the kinds of all layers.
        kinds: The two supported kinds.
        usual: Function that returns the value for a layer number if config.json lacks the key. True selects the second
            kind.
    """
    layers = whole(hf, "num_hidden_layers") if "num_hidden_layers" in hf else 0
    found = entries(hf, key) or [kinds[bool(usual(layer))] for layer in range(layers)]
    if unknown := set(found) - {*kinds}:
        raise ValueError(f"config.json: {key} has {', '.join(map(repr, unknown))}, which is not supported")
    if len(found) != layers:
        raise ValueError(f"config.json: {key} has {len(found)} entries for {layers} layers")
    return [each == kinds[1] for each in found]


def chunks_from_hf(hf: Values) -> Fields:
    """Return the attention chunk size and the layers with chunked attention. If config.json does not list the layers
    with chunked attention, all layers with a rotary embedding have chunked attention."""
    rotated = [] if hf["layer_types"] else rotated_layers(hf)
    local = listed_layers(hf, "layer_types", (FULL, CHUNKED), lambda layer: rotated[layer])
    if hf["attention_chunk_size"] is None or not any(local):
        return {"attention_chunk_size": None}
    chunk = count(hf, "attention_chunk_size")
    return {"attention_chunk_size": chunk, "window_attn_skip_freq": pattern_text(local, usual=True)}


def selecting(period: int, offset: int, layers: int) -> list[bool]:
    """Return a list with one bool per layer: True if the layer has an indexer that selects the keys to attend to. An
    indexer exists in the first `offset` layers and in every `period`-th layer after them."""
    return [max(number - offset, 0) % period == 0 for number in range(1, layers + 1)]


def selections_from_hf(hf: Values) -> Fields:
    """Return the TransformerConfig fields that specify the layers with an indexer. An indexer selects the keys that a
    query attends to. Layers with an indexer must be the first layers of the model and every N-th layer after them."""
    period = count(hf, "index_topk_freq")
    offset = whole(hf, "index_skip_topk_offset")
    layers = whole(hf, "num_hidden_layers")
    full = listed_layers(hf, "indexer_types", ("shared", "full"), selecting(period, offset, layers).__getitem__)
    if all(full):
        return {}
    for offset in range(1, layers):
        for period in range(2, layers + 1):
            if full == selecting(period, offset, layers):
                return {"dsa_indexer_topk_freq": period, "dsa_indexer_skip_topk_offset": offset}
    raise ValueError("config.json: indexer_types must have 'full' in the first layers and then in every N-th layer")


def moe_layers_from_hf(hf: Values) -> str:
    """Return the value of --moe-layer-freq. A config.json either lists the MoE layers, or states that every N-th layer
    is an MoE layer."""
    layers, step = whole(hf, "num_hidden_layers"), count(hf, "interleave_moe_layer_step")
    listed = entries(hf, "moe_layers") if hf["moe_layers"] is not None else range(step - 1, layers, step)
    if not (chosen := set(listed)) <= set(range(layers)) or not chosen:
        raise ValueError(f"config.json: moe_layers = {list(listed)} must be some of the {layers} layers")
    return pattern_text([layer in chosen for layer in range(layers)], usual=True) or "1"


def rotated_layers(hf: Values) -> list[bool]:
    """Return a list with one bool per layer: True if the layer has a rotary embedding. A config.json either lists the
    layers with a rotary embedding, or states that every N-th layer has no rotary embedding."""
    interval = number(hf, "no_rope_layer_interval") if hf.get("no_rope_layer_interval") else 0
    return listed_layers(hf, "no_rope_layers", (0, 1), lambda layer: not interval or (layer + 1) % interval)


def pattern_text(layers: Sequence[bool], usual: bool) -> str | None:
    """Format a layer pattern as a flag value, which is a list of 0 and 1. Return None if all layers have the value
    `usual`."""
    return None if all(layer == usual for layer in layers) else str([int(layer) for layer in layers])
