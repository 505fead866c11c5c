"""Functions that read rotary settings from a config.json: bases, rotated channels, and scaling for longer contexts.

This module does not import torch.
"""

from __future__ import annotations

import math

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import (
    Fields,
    Values,
    entries,
    number,
    table,
    whole,
)
from megatron.extensions.interop.hugging_face.config_json.read_layers import FULL, LOCAL, pattern_text, windows
from megatron.extensions.interop.hugging_face.families import Family
from megatron.training.config.flags import with_fields

YARN_SCALING = {
    "factor": "rotary_scaling_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}

PROPORTIONAL = "proportional"
"""Scaling type that defines one rotary frequency for each pair of channels of a head. A frequency of 0 means that the
channel pair is not rotated."""

LLAMA3_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
}


def rotary_from_hf(hf: Values, family: Family) -> Fields:
    """Return the TransformerConfig fields for the rotary embedding. Newer config.json files store the rotary settings
    under the key `rope_parameters`, and older files under the keys `rope_theta` and `rope_scaling`.

    In newer files, `rope_parameters` may contain separate rotary settings for each kind of layer.
    """
    given = table(hf, "rope_scaling") or table(hf, "rope_parameters")
    usual_percent = rotated_fraction(hf, family)
    merged = {**(table(given, FULL) if FULL in given else given)}
    percent = _percent(merged, usual_percent)
    if percent != 1 and not {"partial_rotary_factor", "rotary_dim", "rope_local_base_freq"} & family.defaults.keys():
        raise ValueError(f"config.json: partial_rotary_factor = {percent:g}, supported: 1 (all channels are rotated)")
    base = merged if "rope_theta" in merged else {"rope_theta": hf.get("rope_theta", 10000.0)}
    fields: Fields = {"rotary_base": float(number(base, "rope_theta")), "rotary_percent": percent}
    fields |= _of_windows(hf, family, given, percent)
    return fields | _scaling(hf, family, merged, FULL in given)


def _percent(rotary: Values, usual: float) -> float:
    return float(number(rotary, "partial_rotary_factor")) if "partial_rotary_factor" in rotary else float(usual)


def _of_windows(hf: Values, family: Family, given: Values, percent: float) -> Fields:
    """Return the TransformerConfig fields for the rotary base and the fraction of rotated channels in layers with a
    sliding window. A field is None if layers with a sliding window use the same value as the other layers.
    """
    none: Fields = {"window_rotary_base": None, "window_rotary_percent": None}
    if FULL not in given:
        base = hf.get("rope_local_base_freq")
        if "rope_local_base_freq" in family.defaults and hf.get("rope_scaling") and base is None:
            # The scaling in rope_scaling applies only to layers without a sliding window.
            base = float(number(hf, "rope_theta"))
        return none | {"window_rotary_base": base}
    if "rope_local_base_freq" not in family.defaults:
        raise ValueError("config.json: separate rope_parameters for layer kinds are not supported")
    if LOCAL not in given:
        raise KeyError(LOCAL)
    full, local = table(given, FULL), table(given, LOCAL)
    if local.get("rope_type", "default") != "default" and local != full:
        raise ValueError("config.json: rope_parameters scale layers with a sliding window, which is not supported")
    own_percent = _percent(local, rotated_fraction(hf, family))
    return {
        "window_rotary_base": None if local == full else float(number(local, "rope_theta")),
        "window_rotary_percent": None if own_percent == percent else own_percent,
    }


def _scaling(hf: Values, family: Family, rotary: dict[str, object], by_kind_of_layer: bool) -> Fields:
    """Return the TransformerConfig fields for rotary scaling, which extends a model to longer contexts."""
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind in ("llama3", "yarn"):
        # The key original_max_position_embeddings outside rope_scaling takes precedence over the key inside.
        beside = "original_max_position_embeddings" in family.class_defaults and not by_kind_of_layer
        rotary["original_max_position_embeddings"] = (
            (beside and hf["original_max_position_embeddings"])
            or rotary.get("original_max_position_embeddings")
            or hf["max_position_embeddings"]
        )
    needed = {"llama3": LLAMA3_SCALING, "linear": ("factor",)}.get(str(kind), ())
    if missing := [key for key in needed if rotary.get(key) is None]:
        raise ValueError(f"config.json: rotary scaling of type {kind!r} lacks {' and '.join(missing)}")
    if kind == "llama3":
        return {"use_rope_scaling": True} | {ours: rotary[key] for key, ours in LLAMA3_SCALING.items()}
    if kind == "linear":
        return {"rotary_seq_len_interpolation_factor": float(number(rotary, "factor"))}
    if kind == "yarn":
        return {"rope_type": "yarn", **yarn_from_hf(rotary, hf)}
    if kind == PROPORTIONAL and _may_be_proportional(family) and by_kind_of_layer:
        factor = float(number(rotary, "factor")) if rotary.get("factor") else 1.0
        return {"rope_type": kind, "rotary_seq_len_interpolation_factor": None if factor == 1 else factor}
    if kind != "default":
        known = "default, linear, llama3, yarn"
        raise ValueError(f"config.json: rotary scaling of type {kind!r} is not supported; supported: {known}")
    return {}


def _may_be_proportional(family: Family) -> bool:
    """Return True if models of a family may use proportional rotary frequencies. This is the case if the family's
    default configuration uses proportional rotary frequencies."""
    return table(table(family.defaults, "rope_parameters"), FULL).get("rope_type") == PROPORTIONAL


def rotated_fraction(hf: Values, family: Family) -> float:
    """Return the fraction of a head's channels that are rotated. If config.json contains the number of rotated
    channels, as in MiniMax M2 and GPT-J, the fraction is computed from this number."""
    if "partial_rotary_factor" in hf:
        return number(hf, "partial_rotary_factor")
    if not hf.get("rotary_dim"):
        return 1.0
    theirs = {ours: key for key, ours in family.keys.items()}
    if hf.get("head_dim"):
        width = whole(hf, "head_dim")
    else:
        width = whole(hf, theirs["hidden_size"]) // whole(hf, theirs["num_attention_heads"])
    return number(hf, "rotary_dim") / width


def yarn_from_hf(scaling: Values, hf: Values) -> Fields:
    """Return the TransformerConfig fields for YaRN scaling. Raises ValueError if `scaling` contains an attention_factor
    that differs from the factor implied by the other settings."""
    longest = number(hf, "max_position_embeddings")
    given: Fields = {"original_max_position_embeddings": longest}
    given |= {key: value for key, value in scaling.items() if value is not None}
    original = number(given, "original_max_position_embeddings")
    given.setdefault("factor", longest / original)
    settings = {ours: float(number(given, key)) for key, ours in YARN_SCALING.items() if key in given}
    if given.get("mscale_all_dim") and not given.get("mscale"):
        raise ValueError("config.json: YaRN with mscale_all_dim but without mscale is not supported")
    if given.get("mscale_all_dim"):
        settings |= {key: float(number(given, key)) for key in ("mscale", "mscale_all_dim")}
    fields: Fields = {**settings, "original_max_position_embeddings": int(original)}
    fields["yarn_correction_range_round_to_int"] = bool(given.get("truncate", True))
    found = with_fields(TransformerConfig(rope_type="yarn"), fields).rotary_mscale
    wanted = given.get("attention_factor")
    if wanted is not None and not math.isclose(number(given, "attention_factor"), found, rel_tol=1e-6):
        raise ValueError(f"config.json: YaRN with attention_factor = {wanted} is not supported; it must be {found:.6g}")
    return fields


def bases_from_hf(hf: Values, family: Family) -> Fields:
    """Return the TransformerConfig fields for the rotary bases and for the layers without rotary embedding. The key
    `layer_rope_theta` of config.json lists one rotary base per layer. A base of 0 means that the layer has no rotary
    embedding."""
    full, local = by_kind(hf, family, "layer_rope_theta", without=0)
    scaling = table(hf, "rope_scaling") or table(hf, "rope_parameters")
    if scaling.get("rope_type", "default") != "default" and full and local and full != local:
        raise ValueError("config.json: rope_parameters scale layers with a sliding window, which is not supported")
    bases = {"full": full, "local": local, "any": full or local}
    fields: Fields = {"rotary_base": float(number(bases, "any"))} if bases["any"] else {}
    fields["window_rotary_base"] = float(number(bases, "local")) if full and local and full != local else None
    unrotated = [not base for base in entries(hf, "layer_rope_theta")]
    return fields | {"no_rope_freq": pattern_text(unrotated, usual=False)}


def by_kind(hf: Values, family: Family, key: str, without: object = None) -> tuple[object, object]:
    """Return a pair of values: one for layers with full attention and one for layers with a sliding window. In
    config.json, `key` lists one value per layer.

    Layers whose value in this list equals `without` are ignored. If the model has no layers with full attention, the
    first value is None. If the model has no layers with a sliding window, the second value is None.
    """
    listed = entries(hf, key)
    local = windows(hf, family) if hf.get("sliding_window") else [False] * whole(hf, "num_hidden_layers")
    if len(listed) != len(local):
        raise ValueError(f"config.json: {key} has {len(listed)} entries for {len(local)} layers")
    found = []
    for kind in (False, True):
        values = {value for value, each in zip(listed, local, strict=True) if each == kind and value != without}
        if len(values) > 1:
            raise ValueError(
                f"config.json: {key} = {hf[key]} differs among layers {'with' if kind else 'without'} a window"
            )
        found.append(next(iter(values), None))
    return found[0], found[1]
