"""Hugging Face families: names and layouts of weights, and keys of config.json. No torch.

A `Rule` pairs one of our parameters with their tensors. A `Family` has the rules of a `model_type` and maps the keys of
its config.json to our fields. `family_files` reads them from files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One of our parameters and their tensors. `{i}` is the layer number, `{i/2}` and `{i%2}` are half of it and the
    rest, `{e}` stands for every expert. Of a module of multi-token prediction `{i}` is the depth from 0, `{n}` that
    number counted on from the layers."""

    ours: str
    theirs: tuple[str, ...]
    layout: Any = "Same"
    """How they make up ours: the name of a class in `layouts`, or a `Layout` of your own."""


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

    fixed: Mapping[str, Any]
    """Fields of TransformerConfig that are fixed for the family."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that a config.json may lack."""

    class_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Value of each key that their configuration class has, where a config.json lacks it. None if the class derives it
    from other keys; see `class_values`."""

    class_names: Mapping[str, str] = field(default_factory=dict)
    """Other names by which that class knows its keys."""

    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
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
    """Rules of the modules of multi-token prediction, where their files have them."""

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

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Key of config.json -> its values, the only ones that we support -> those of our field. If several have the same
    meaning, we write the first one."""

    file: str = "an extension"
    """Where it is stated, for messages."""
