"""Reads rotary embeddings of a config.json: bases, rotated channels, and scaling for longer contexts. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron.core.config.model import TransformerConfig
from megatron.extensions.hugging_face.families import Family
from megatron.extensions.hugging_face.read_layers import FULL, LOCAL, pattern_text, windows

YARN_SCALING = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}

LLAMA3_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
}


def rotary_from_hf(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Reads rotary settings from `rope_theta` and `rope_scaling`, or from `rope_parameters` of newer files, which may
    have them for each kind of layer."""
    merged = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    local_base, local_percent = hf.get("rope_local_base_freq"), None
    usual_percent = rotated_fraction(hf, family)
    by_kind_of_layer = FULL in merged
    if by_kind_of_layer:
        if "rope_local_base_freq" not in family.defaults:
            raise ValueError("config.json: rope_parameters by kind of layer are not supported")
        local, merged = merged[LOCAL], merged[FULL]
        if local.get("rope_type", "default") != "default" and local != merged:
            raise ValueError("config.json: rope_parameters scale the layers with a sliding window")
        local_base = None if local == merged else float(local["rope_theta"])
        local_percent = float(local.get("partial_rotary_factor", usual_percent))
    elif "rope_local_base_freq" in family.defaults and hf.get("rope_scaling") and local_base is None:
        local_base = float(hf["rope_theta"])  # the older key scales only layers without a window
    kind = merged.get("rope_type", merged.get("type", "default"))
    percent = float(merged.get("partial_rotary_factor", usual_percent))
    if percent != 1 and not {"partial_rotary_factor", "rotary_dim", "rope_local_base_freq"} & family.defaults.keys():
        raise ValueError(f"config.json: partial_rotary_factor = {percent:g}, supported: 1, as all channels are rotated")
    fields: dict[str, Any] = {
        "rotary_base": float(merged.get("rope_theta", hf.get("rope_theta", 10000.0))),
        "rotary_percent": percent,
        "window_rotary_base": local_base,
        "window_rotary_percent": None if local_percent == percent else local_percent,
    }
    if kind in ("llama3", "yarn"):  # a key of the class goes first, then that of the object, then the longest context
        beside = "original_max_position_embeddings" in family.class_defaults and not by_kind_of_layer
        original = (
            (beside and hf["original_max_position_embeddings"])
            or merged.get("original_max_position_embeddings")
            or hf["max_position_embeddings"]
        )
        merged["original_max_position_embeddings"] = original
    needed = {"llama3": LLAMA3_SCALING, "linear": ("factor",)}.get(str(kind), ())
    if missing := [key for key in needed if merged.get(key) is None]:
        raise ValueError(f"config.json: rotary scaling of type {kind!r} lacks {' and '.join(missing)}")
    if kind == "llama3":
        fields["use_rope_scaling"] = True
        fields |= {ours: merged[key] for key, ours in LLAMA3_SCALING.items()}
    elif kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = float(merged["factor"])
    elif kind == "yarn":
        fields |= {"rope_type": "yarn", **yarn_from_hf(merged, hf)}
    elif kind != "default":
        known = "default, linear, llama3, yarn"
        raise ValueError(f"config.json: rotary scaling of type {kind!r} is not supported; known are {known}")
    return fields


def rotated_fraction(hf: Mapping[str, Any], family: Family) -> float:
    """Fraction of a head's channels that are rotated; MiniMax M2 and GPT-J count them."""
    if not hf.get("rotary_dim"):
        return hf.get("partial_rotary_factor", 1.0)
    theirs = {ours: key for key, ours in family.keys.items()}
    width = hf.get("head_dim") or hf[theirs["hidden_size"]] // hf[theirs["num_attention_heads"]]
    return hf.get("partial_rotary_factor", hf["rotary_dim"] / width)


def yarn_from_hf(scaling: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of YaRN. The factor of rotated channels may be given as such, or by mscale and mscale_all_dim."""
    given = {key: value for key, value in scaling.items() if value is not None}
    original = given.get("original_max_position_embeddings", hf["max_position_embeddings"])
    given.setdefault("factor", hf["max_position_embeddings"] / original)
    fields: dict[str, Any] = {ours: float(given[key]) for key, ours in YARN_SCALING.items() if key in given}
    fields["original_max_position_embeddings"] = int(original)
    both = given.get("mscale") and given.get("mscale_all_dim")
    fields |= {"mscale": float(given["mscale"]), "mscale_all_dim": float(given["mscale_all_dim"])} if both else {}
    fields["yarn_correction_range_round_to_int"] = bool(given.get("truncate", True))
    if given.get("mscale_all_dim") and not both:
        raise ValueError("config.json: YaRN with mscale_all_dim and without mscale is not supported")
    wanted = given.get("attention_factor")
    found = TransformerConfig(rope_type="yarn", **fields).rotary_mscale
    if wanted is not None and not math.isclose(wanted, found, rel_tol=1e-6):
        raise ValueError(f"config.json: YaRN with attention_factor = {wanted} is not supported; it must be {found:.6g}")
    return fields


def bases_from_hf(hf: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Rotary bases of layers, 0 for those without rotary embedding."""
    listed, (full, local) = hf["layer_rope_theta"], by_kind(hf, family, "layer_rope_theta", without=0)
    scaled = (hf.get("rope_scaling") or hf.get("rope_parameters") or {}).get("rope_type", "default") != "default"
    if scaled and full and local and full != local:
        raise ValueError("config.json: rope_parameters scale the layers with a sliding window")
    fields: dict[str, Any] = {"rotary_base": float(full or local)} if full or local else {}
    fields["window_rotary_base"] = float(local) if full and local and full != local else None
    return fields | {"no_rope_freq": pattern_text([not base for base in listed], usual=False)}


def by_kind(hf: Mapping[str, Any], family: Family, key: str, without: Any = None) -> tuple[Any, Any]:
    """From a list by layer, the value of layers that see all earlier tokens, and of those with a sliding window; None
    if there are none, apart from those with the value `without`."""
    local = windows(hf, family) if hf.get("sliding_window") else [False] * hf["num_hidden_layers"]
    if len(hf[key]) != len(local):
        raise ValueError(f"config.json: {key} has {len(hf[key])} entries for {len(local)} layers")
    found = []
    for kind in (False, True):
        values = {value for value, each in zip(hf[key], local, strict=True) if each == kind and value != without}
        if len(values) > 1:
            raise ValueError(
                f"config.json: {key} = {hf[key]} differs among layers {'with' if kind else 'without'} a window"
            )
        found.append(next(iter(values), None))
    return found[0], found[1]
