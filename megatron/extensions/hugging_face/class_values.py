"""Values of keys that a config.json lacks, as the configuration class of transformers has or derives them. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from megatron.extensions.hugging_face.families import Family

Values = Mapping[str, Any]

ROTARY = "rope_parameters"

UNSET = (None, "auto")
"""Values by which a class says that it derives a key from others."""


def usual_names(family: Family) -> dict[str, str]:
    """Other spelling of a key -> the name by which the family's tables call it."""
    names = dict(family.aliases) | {theirs: usual for usual, theirs in family.spelling.items()}
    of_class = {name: names.get(usual, usual) for name, usual in family.class_names.items()}
    return {name: usual for name, usual in of_class.items() if name != usual and name not in family.keys} | names


def by_precedence(given: Iterable[str], family: Family) -> list[str]:
    """Keys in the order in which later ones replace earlier ones. Other spellings are last, as classes read them after
    the usual keys."""
    return sorted(given, key=lambda key: key in family.aliases or key in family.class_names)


def usual_values(family: Family, names: Mapping[str, str]) -> dict[str, Any]:
    """The value of each key that a config.json lacks, under the family's usual names.

    The class's default goes first. Where it is None, the class derives the value from others, and the family's default
    says what follows.
    """
    of_class = {names.get(key, key): value for key, value in family.class_defaults.items()}
    return {**family.defaults, **{key: value for key, value in of_class.items() if _stands(key, value, family)}}


def _stands(key: str, value: Any, family: Family) -> bool:
    return value is not None or key in DERIVED or family.defaults.get(key) is None


def inner_values(hf_config: Values, family: Family) -> dict[str, Any]:
    """Values of keys inside an object that the family reads one by one, as `object.key`."""
    found: dict[str, Any] = {}
    for outer in {
        known.partition(".")[0] for known in (*family.keys, *family.defaults, *family.aliases) if "." in known
    }:
        inner = hf_config.get(outer) or family.defaults.get(outer)
        if outer == ROTARY:  # an older name goes first, and the longest context is that before scaling by default
            inner = hf_config.get("rope_scaling") or inner
            longest = "max_position_embeddings"
            usual = {f"original_{longest}": hf_config.get(longest, family.class_defaults.get(longest))}
            inner = {**usual, **inner} if isinstance(inner, dict) and _kind(inner) == "yarn" else inner
        if isinstance(inner, dict):
            found |= {f"{outer}.{name}": each for name, each in inner.items()}
    return found


def _kind(rotary: Values) -> Any:
    return rotary.get("rope_type", rotary.get("type"))


def _mamba_width(hf: Values) -> int:
    inner = hf.get("mamba_d_ssm")
    return (hf["mamba_expand"] * hf["hidden_size"] if inner is None else inner) // hf["mamba_n_heads"]


def _step_rank(hf: Values) -> int:
    return math.ceil(hf["hidden_size"] / 16)


DERIVED: Mapping[str, Callable[[Values], Any]] = {
    "mamba_d_head": _mamba_width,
    "mamba_dt_rank": _step_rank,
    "time_step_rank": _step_rank,
    "v_head_dim": lambda hf: hf["hidden_size"] // hf["num_attention_heads"],
    "linear_num_key_heads": lambda hf: hf["num_attention_heads"],
    "linear_num_value_heads": lambda hf: hf["num_attention_heads"],
    "linear_key_head_dim": lambda hf: int(0.75 * hf["hidden_size"] / hf["linear_num_key_heads"]),
    "linear_value_head_dim": lambda hf: 2 * hf["linear_key_head_dim"],
    "initializer_range": lambda hf: 2 / (5 * hf["hidden_size"]) ** 0.5,
    "embedding_initializer_range": lambda hf: 2 * hf["initializer_range"],
    "ssm_multipliers": lambda hf: [1.0] * 5,
    "mlp_multipliers": lambda hf: [1.0] * 2,
}
"""Key -> what classes derive it from, in the order in which they do."""


def derived_values(hf: Values, family: Family, names: Mapping[str, str]) -> dict[str, Any]:
    """The values of keys that the family's class derives, where a config.json leaves them open."""
    open_keys = {names.get(key, key) for key, value in family.class_defaults.items() if value in UNSET}
    found: dict[str, Any] = {}
    for key, derive in DERIVED.items():
        if key in open_keys and hf.get(key) in UNSET:
            found[key] = derive({**hf, **found})
    return found
