"""Hugging Face families: names and layouts of weights, and keys of config.json. This module does not import torch.

A `Rule` pairs one of our parameters with their tensors. A `Family` has the rules of a `model_type` and maps the keys of
its config.json to our fields. `family_files` reads them from files.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.core.registry import NoFacts, Registry
from megatron.extensions.interop.hugging_face.config_json.config_values import Fields, Values, number, whole

if TYPE_CHECKING:
    from megatron.core.config.model import TransformerConfig
    from megatron.extensions.interop.hugging_face.layouts import Layout


@dataclass(frozen=True)
class Rule:
    """One of our parameters and their tensors. `{i}` is the layer number, `{i/2}` and `{i%2}` are half of it and the
    rest, `{e}` stands for every expert. Of a multi-token prediction module `{i}` is the depth from 0, `{n}` that number
    counted on from the layers."""

    ours: str
    theirs: tuple[str, ...]
    layout: str | Layout = "Same"
    """How they make up ours: the name of one in `named_layouts`, or a `Layout` of your own."""


class Adapter(ABC):
    """Reads and writes keys of config.json that have rules of their own, see `adapters`."""

    @abstractmethod
    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        """The fields of a model, given those of the family's tables. Raises ValueError."""

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        """The keys of a model, given those of the family's tables; `stated` are all fields of `config` with the values
        that follow from others."""
        return hf


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face."""

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]

    prefix: str
    """Prefix of their names. Files of the bare decoder lack it."""

    keys: Mapping[str, str]
    """Key of config.json -> field of TransformerConfig, for equal values. In a file null removes a key of the base."""

    fixed: Mapping[str, object]
    """Fields of TransformerConfig that are fixed for the family."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Defaults of keys that a config.json may lack."""

    class_defaults: Mapping[str, object] = field(default_factory=dict)
    """Value of each key that their configuration class has, where a config.json lacks it. None if the class derives it
    from other keys; see `derived_values`."""

    class_names: Mapping[str, str] = field(default_factory=dict)
    """Other names by which that class knows its keys."""

    only: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Keys with the only values that we support; we write the first one."""

    ignored: Sequence[str] = (".rotary_emb.inv_freq",)
    """Suffixes of names of tensors that are not weights."""

    quantized: Sequence[str] = ()
    """Methods of quantization whose weights are read, by their name in config.json."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Another spelling of a part of names of tensors -> the usual one."""

    left_out: Sequence[str] = ()
    """Prefixes of names of tensors of modules that their class does not have either."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of keys of config.json."""

    spelling: Mapping[str, str] = field(default_factory=dict)
    """Usual name of a key that has rules of its own -> its name in this family's config.json."""

    multi_token: Sequence[Rule] = ()
    """Rules of the multi-token prediction modules, where their files have them."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """Their names of further tensors of such a module -> our parameter that they are copies of."""

    multi_token_key: str | None = None
    """Key with the number of these modules."""

    unwritten: Sequence[str] = ()
    """Keys that only say how a config.json without newer keys is read."""

    layers_each: int = 1
    """Our layers for each one that config.json counts."""

    windows_below: str | None = None
    """Key with a number: layers from this one on have no window, where a config.json does not list kinds of layers."""

    window_groups: int = 1
    """Key/value heads of a layer with a sliding window, for each one of other layers."""

    earlier_tokens: str | None = None
    """Key with the earlier tokens in a sliding window, where that is given: one less than --window-size."""

    width_without_experts: str | None = None
    """Key with the width of the MLP of a model of 0 experts, beside experts that of the shared expert."""

    adapters: Sequence[Adapter] = ()
    """Read and write keys with rules of their own, in this order. A file names classes of `config_json.adapters`, and
    "like" for those of the base."""

    rotary_by_adapter: bool = False
    """True if an adapter reads the rotary embedding."""

    rotary_layers: str = "all"
    """Layers with a rotary embedding: "all", those with sliding "windows", or these "windows, if any"."""

    equal: Mapping[str, str] = field(default_factory=dict)
    """Key -> the key whose value it must have, where it is given."""

    same: Mapping[str, str] = field(default_factory=dict)
    """Field of TransformerConfig -> the field whose value it has."""

    powers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Field of TransformerConfig -> keys of config.json, of whose values to these powers it is the product. The first
    one is that which follows from the field."""

    layer_types: Sequence[str] = ()
    """Kinds of the first layers, which repeat, where a config.json does not list them."""

    first_layer_types: Sequence[str] = ()
    """Kinds of the first layers, in place of those of `layer_types`."""

    last_layer_type: str | None = None
    """Kind of the last layer, in place of that of `layer_types`."""

    needed_layer_type: str | None = None
    """Kind of the last layer if no other layer is of this kind."""

    linear_kind: str = "linear_attention"
    """Kind in layer_types of a layer with linear attention."""

    values: Mapping[str, Mapping[object, object]] = field(default_factory=dict)
    """Key of config.json -> its values, the only ones that we support -> those of our field. If several have the same
    meaning, we write the first one."""

    file: str = "an extension"
    """The place where it is stated, for messages."""


FAMILIES = Registry("model_type", NoFacts, protocol=Family)
"""The families by their `model_type`; a file of --hf-family adds one without code.

    FAMILIES.register("pebble", replace(FAMILIES["llama"], model_type="pebble", rules=RULES))
"""

# Values of keys that a config.json lacks, as the configuration class of transformers has or derives them.

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


def usual_values(family: Family, names: Mapping[str, str]) -> Fields:
    """The value of each key that a config.json lacks, under the family's usual names.

    The class's default goes first. Where it is None, the class derives the value from others, and the family's default
    says what follows.
    """
    of_class = {names.get(key, key): value for key, value in family.class_defaults.items()}
    return {**family.defaults, **{key: value for key, value in of_class.items() if _stands(key, value, family)}}


def _stands(key: str, value: object, family: Family) -> bool:
    return value is not None or key in DERIVED or family.defaults.get(key) is None


def inner_values(hf_config: Values, family: Family) -> Fields:
    """Values of keys inside an object that the family reads one by one, as `object.key`."""
    found: Fields = {}
    nested = (known for known in (*family.keys, *family.defaults, *family.aliases) if "." in known)
    for outer in {known.partition(".")[0] for known in nested}:
        inner = hf_config.get(outer) or family.defaults.get(outer)
        if outer == ROTARY:  # an older name goes first, and the longest context is that before scaling by default
            inner = hf_config.get("rope_scaling") or inner
            longest = "max_position_embeddings"
            usual = {f"original_{longest}": hf_config.get(longest, family.class_defaults.get(longest))}
            inner = {**usual, **inner} if isinstance(inner, dict) and _kind(inner) == "yarn" else inner
        if isinstance(inner, dict):
            found |= {f"{outer}.{name}": each for name, each in inner.items()}
    return found


def _kind(rotary: Values) -> object:
    return rotary.get("rope_type", rotary.get("type"))


def _mamba_width(hf: Values) -> int:
    if hf.get("mamba_d_ssm") is not None:
        return whole(hf, "mamba_d_ssm") // whole(hf, "mamba_n_heads")
    return whole(hf, "mamba_expand") * whole(hf, "hidden_size") // whole(hf, "mamba_n_heads")


def _step_rank(hf: Values) -> int:
    return math.ceil(whole(hf, "hidden_size") / 16)


DERIVED: Mapping[str, Callable[[Values], object]] = {
    "mamba_d_head": _mamba_width,
    "mamba_dt_rank": _step_rank,
    "time_step_rank": _step_rank,
    "v_head_dim": lambda hf: whole(hf, "hidden_size") // whole(hf, "num_attention_heads"),
    "linear_num_key_heads": lambda hf: hf["num_attention_heads"],
    "linear_num_value_heads": lambda hf: hf["num_attention_heads"],
    "linear_key_head_dim": lambda hf: int(0.75 * whole(hf, "hidden_size") / whole(hf, "linear_num_key_heads")),
    "linear_value_head_dim": lambda hf: 2 * whole(hf, "linear_key_head_dim"),
    "initializer_range": lambda hf: 2 / (5 * number(hf, "hidden_size")) ** 0.5,
    "embedding_initializer_range": lambda hf: 2 * number(hf, "initializer_range"),
    "ssm_multipliers": lambda hf: [1.0] * 5,
    "mlp_multipliers": lambda hf: [1.0] * 2,
}
"""Key -> what classes derive it from, in the order in which they do."""


def derived_values(hf: Values, family: Family, names: Mapping[str, str]) -> Fields:
    """The values of keys that the family's class derives, where a config.json leaves them open."""
    open_keys = {names.get(key, key) for key, value in family.class_defaults.items() if value in UNSET}
    found: Fields = {}
    for key, derive in DERIVED.items():
        if key in open_keys and hf.get(key) in UNSET:
            found[key] = derive({**hf, **found})
    return found
