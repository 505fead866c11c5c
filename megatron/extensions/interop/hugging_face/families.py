"""Descriptions of Hugging Face families: their weight names and layouts, and their keys of config.json. This module
does not import torch.

A `Rule` maps Hugging Face tensors to one parameter of this program. A `Family` contains the rules of a `model_type`,
and maps the keys of its config.json to TransformerConfig fields. `family_files` reads families from files.
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
    """Parameter of this program, and the Hugging Face tensors that form it.

    `{i}` is the layer number. `{i/2}` and `{i%2}` are the quotient and the remainder of the layer number divided by 2.
    `{e}` is the expert number. In a multi-token prediction module, `{i}` is the depth, counted from 0, and `{n}` is the
    depth plus the number of layers.
    """

    ours: str
    theirs: tuple[str, ...]
    layout: str | Layout = "Same"
    """Layout that converts between the Hugging Face tensors and the parameter. The layout is either the name of an
    entry in `named_layouts`, or a custom `Layout` object."""


class Adapter(ABC):
    """Base class of adapters, which read and write config.json keys that a family's tables cannot translate; see
    `adapters`."""

    @abstractmethod
    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        """Return `fields` together with the TransformerConfig fields that this adapter reads from config.json. `fields`
        contains the fields from the family's tables. Raises ValueError for unsupported values."""

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        """Return the config.json keys of a model.

        Args:
            hf: Keys from the family's tables.
            config: The model.
            stated: All fields of `config`, including derived values.
            family: Family whose config.json is written.
        """
        return hf


@dataclass(frozen=True)
class Family:
    """Hugging Face family, identified by its `model_type`."""

    model_type: str
    architecture: str
    rules: tuple[Rule, ...]

    prefix: str
    """Prefix of Hugging Face tensor names. In files that contain only the decoder, tensor names lack this prefix."""

    keys: Mapping[str, str]
    """Maps a config.json key to the TransformerConfig field with the same value. In a family file, the value null
    removes a key that the file would inherit from its base (`like`)."""

    fixed: Mapping[str, object]
    """TransformerConfig fields with a fixed value in this family."""

    defaults: Mapping[str, object] = field(default_factory=dict)
    """Default values of keys that a config.json may lack."""

    class_defaults: Mapping[str, object] = field(default_factory=dict)
    """Maps each key to its default in the family's configuration class. None means that the class derives the value
    from other keys; see `derived_values`.
    """

    class_names: Mapping[str, str] = field(default_factory=dict)
    """Maps key names of the family's transformers class to the names of these keys in the family's tables, for keys
    whose names differ."""

    only: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Maps config.json keys to their supported values. Exports write the first supported value of each key."""

    ignored: Sequence[str] = (".rotary_emb.inv_freq",)
    """Name suffixes of tensors that are not weights."""

    unread: Sequence[str] = ()
    """Name suffixes of tensors that files may contain even for layers that have no such weights. The transformers class
    does not read these tensors."""

    quantized: Sequence[str] = ()
    """Quantization methods whose weights can be read, named as in config.json."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Some files contain alternative spellings of parts of tensor names. This dict maps these spellings to the
    spellings in the family's rules."""

    left_out: Sequence[str] = ()
    """Name prefixes of tensors to ignore, because the transformers model class has no modules for these tensors."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """Maps alternative spellings of config.json keys to the spellings that the family's tables use."""

    spelling: Mapping[str, str] = field(default_factory=dict)
    """Maps names of config.json keys in this program's code to the names of the same keys in this family. Only keys
    whose names differ are listed."""

    multi_token: Sequence[Rule] = ()
    """Rules for the weights of multi-token prediction modules. The sequence is empty if the family's files contain no
    multi-token prediction modules."""

    copies: Mapping[str, str] = field(default_factory=dict)
    """Maps the names of additional tensors in multi-token prediction modules to the parameters that these tensors
    copy."""

    multi_token_key: str | None = None
    """Key of config.json that contains the number of multi-token prediction modules."""

    unwritten: Sequence[str] = ()
    """Keys that are read but never written to a config.json. These keys matter only for an older config.json that lacks
    newer keys."""

    layers_each: int = 1
    """Number of layers in this program's model that correspond to one layer in config.json."""

    windows_below: str | None = None
    """Key of config.json that contains the number of the first layer without a sliding window. The key is read only if
    config.json does not list the layer kinds."""

    window_groups: int = 1
    """Ratio of the number of key/value heads in layers with a sliding window to the number of key/value heads in other
    layers."""

    earlier_tokens: str | None = None
    """Key of config.json that contains the sliding-window size without the current token. This size is --window-size
    minus one."""

    width_without_experts: str | None = None
    """Key of config.json that contains the MLP width of models without experts. In MoE models, this key contains the
    shared expert's width instead."""

    adapters: Sequence[Adapter] = ()
    """Adapters that read and write the keys that the family's tables cannot translate. The adapters are called in the
    order of this sequence.

    In a family file, adapters are listed by their names in `config_json.adapters.ADAPTERS`. The entry "like" inserts
    the adapters of the base that the file extends.
    """

    rotary_by_adapter: bool = False
    """True if an adapter reads the rotary settings, so that `rotary_from_hf` is not called."""

    rotary_layers: str = "all"
    """Rule that selects the layers with a rotary embedding. "all" selects all layers, and "windows" selects only layers
    with a sliding window. "windows, if any" is the same as "windows" if the model has layers with a sliding window, and
    otherwise the same as "all"."""

    equal: Mapping[str, str] = field(default_factory=dict)
    """Maps a config.json key to another key that must have the same value if config.json contains both."""

    same: Mapping[str, str] = field(default_factory=dict)
    """Maps a TransformerConfig field to another field with the same value."""

    powers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Maps a TransformerConfig field to config.json keys and their exponents. The field's value is the product of the
    keys' values, each raised to its exponent.

    When config.json is written, the first key gets the value for which the product equals the field's value.
    """

    layer_types: Sequence[str] = ()
    """Layer kinds for a config.json that does not list the kinds. The sequence is repeated until all layers have a
    kind."""

    first_layer_types: Sequence[str] = ()
    """Layer kinds that the first layers always have, regardless of `layer_types` in config.json."""

    last_layer_type: str | None = None
    """Layer kind that the last layer always has, regardless of `layer_types` in config.json."""

    needed_layer_type: str | None = None
    """Layer kind that must occur at least once. If no layer has this kind, the kind of the last layer is changed to
    this kind."""

    linear_kind: str = "linear_attention"
    """Value in layer_types for a layer with linear attention."""

    values: Mapping[str, Mapping[object, object]] = field(default_factory=dict)
    """Maps config.json keys to translation tables. Each table maps the supported values of the key to values of the
    corresponding TransformerConfig field.

    If several config.json values map to the same field value, the first of these config.json values is written.
    """

    file: str = "an extension"
    """File that defines the family, for messages."""


FAMILIES = Registry("model_type", NoFacts, protocol=Family)
"""Registered families, keyed by `model_type`. Users can add a family without code by passing a file to --hf-family. In
code, a family is registered as follows:

    FAMILIES.register("pebble", replace(FAMILIES["llama"], model_type="pebble", rules=RULES))
"""

# Values of keys that a config.json lacks. The transformers configuration class defines defaults for these keys, or
# derives their values from other keys.

ROTARY = "rope_parameters"

UNSET = (None, "auto")
"""Values that mean that a config.json key is not set. The transformers class then computes the value of the key from
other keys."""


def usual_names(family: Family) -> dict[str, str]:
    """Return a dict that maps alternative names of config.json keys to the names in the family's tables."""
    names = dict(family.aliases) | {theirs: usual for usual, theirs in family.spelling.items()}
    of_class = {name: names.get(usual, usual) for name, usual in family.class_names.items()}
    return {name: usual for name, usual in of_class.items() if name != usual and name not in family.keys} | names


def by_precedence(given: Iterable[str], family: Family) -> list[str]:
    """Sort the keys of a config.json by increasing precedence. If two keys specify the same setting, the later key
    takes effect.

    Alternative key names come last, because the transformers classes give them precedence over the usual key names.
    """
    return sorted(given, key=lambda key: key in family.aliases or key in family.class_names)


def usual_values(family: Family, names: Mapping[str, str]) -> Fields:
    """Return the default value of each config.json key. Keys have the names that the family's tables use.

    The default of the transformers class takes precedence. A default of None in the transformers class means that the
    class derives the value from other keys. For such a key, the family's default is used, unless the key is in
    `DERIVED`.
    """
    of_class = {names.get(key, key): value for key, value in family.class_defaults.items()}
    return {**family.defaults, **{key: value for key, value in of_class.items() if _stands(key, value, family)}}


def _stands(key: str, value: object, family: Family) -> bool:
    return value is not None or key in DERIVED or family.defaults.get(key) is None


def inner_values(hf_config: Values, family: Family) -> Fields:
    """Return values in nested objects of config.json, keyed by `object.key`. A nested object is included only if the
    family's tables contain a key of the form `object.key`."""
    found: Fields = {}
    nested = (known for known in (*family.keys, *family.defaults, *family.aliases) if "." in known)
    for outer in {known.partition(".")[0] for known in nested}:
        inner = hf_config.get(outer) or family.defaults.get(outer)
        if outer == ROTARY:
            # The key's older name, rope_scaling, takes precedence.
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
"""Maps each derived key to the function that computes its value from other keys. The keys are in the order in which the
transformers classes compute them."""


def derived_values(hf: Values, family: Family, names: Mapping[str, str]) -> Fields:
    """Return the values of keys that config.json does not set and that the family's transformers class derives from
    other keys."""
    open_keys = {names.get(key, key) for key, value in family.class_defaults.items() if value in UNSET}
    found: Fields = {}
    for key, derive in DERIVED.items():
        if key in open_keys and hf.get(key) in UNSET:
            found[key] = derive({**hf, **found})
    return found
