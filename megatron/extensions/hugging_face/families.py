"""Hugging Face families: names and layouts of weights, and keys of config.json, from families.json. No torch.

A `Rule` pairs one of our parameters with their tensors. A `Family` has the rules of a `model_type` and maps the keys of
its config.json to our fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Rule:
    """One of our parameters and their tensors. `{i}` is the layer number, `{e}` stands for every expert. Of a module of
    multi-token prediction `{i}` is the depth from 0, `{n}` that number counted on from the layers."""

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
    """Key of config.json -> field of TransformerConfig, for equal values."""

    fixed: Mapping[str, Any]
    """Fields of TransformerConfig that are fixed for the family."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of keys that a config.json may lack."""

    only: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Keys with the only values that we support; we write the first one."""

    ignored: Sequence[str] = (".rotary_emb.inv_freq",)
    """Suffixes of names of tensors that are not weights."""

    quantized: Sequence[str] = ()
    """Methods of quantization whose weights are read, by their name in config.json."""

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

    window_groups: int = 1
    """Key/value heads of a layer with a sliding window, for each one of other layers."""

    earlier_tokens: str | None = None
    """Key with the earlier tokens in a sliding window, where that is given: one less than --window-size."""

    rotary_layers: str = "all"
    """Layers with a rotary embedding: "all", those with sliding "windows", or these "windows, if any"."""

    equal: Mapping[str, str] = field(default_factory=dict)
    """Key -> the key whose value it must have, where it is given."""

    same: Mapping[str, str] = field(default_factory=dict)
    """Field of TransformerConfig -> the field whose value it has."""

    inverse_roots: Mapping[str, str] = field(default_factory=dict)
    """Key of config.json -> field of TransformerConfig that is 1 / sqrt of its value."""

    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Key of config.json -> its values, the only ones that we support -> those of our field. If several have the same
    meaning, we write the first one."""


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return json.loads(files(__package__).joinpath("families.json").read_text(encoding="utf-8"))


def _table(name: str) -> dict[str, Any]:
    """An entry of families.json: what it adds to the entry that it is `like`, if any."""
    own = dict(_tables()[name])
    base = _table(own.pop("like")) if "like" in own else {}
    return base | {
        key: base[key] | value if key in base and isinstance(value, dict) else value for key, value in own.items()
    }


def missing_feature(model_type: object) -> str | None:
    """Layer that a family needs and we do not have; None for one that is not known to need anything."""
    return _tables()["not expressible"].get(model_type) if isinstance(model_type, str) else None


def _rules(weights: Mapping[str, str], our_layer: str, their_layer: str) -> Iterator[Rule]:
    """Rules of a table of weights, ours -> theirs. Theirs are separated by spaces, behind the name of a layout and a
    colon if that is not "Same". A name that begins with a dot is one in a layer; `*` is both weight and bias."""

    def whole(name: str, layer: str, kind: str) -> str:
        return (layer + name if name.startswith(".") else name).replace("*", kind)

    for ours, theirs in weights.items():
        layout, _, names = theirs.rpartition(": ")
        for kind in ("weight", "bias") if "*" in ours else ("",):
            listed = tuple(whole(name, their_layer, kind) for name in names.split())
            yield Rule(whole(ours, our_layer, kind), listed, layout or "Same")


def _by_name(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Rules, the last one of each of our parameters."""
    return tuple({rule.ours: rule for rule in rules}.values())


def _family(model_type: str) -> Family:
    """A family of families.json. Its `weights` are names of tables in "weights", and tables of its own, of which later
    ones replace what earlier ones have. `multi_token_weights` are those of modules of multi-token prediction outside of
    their layer, which has the family's weights and is called `multi_token_layer`."""
    table, tables = _table(model_type), _tables()["weights"]
    booleans = {"true": True, "false": False}  # JSON has texts only as keys
    for key, values in table.get("values", {}).items():
        table["values"][key] = {booleans.get(theirs, theirs): ours for theirs, ours in values.items()}
    weights: dict[str, str] = {}
    for each in table.pop("weights"):
        weights |= tables[each] if isinstance(each, str) else each
    rules, further = _rules(weights, "decoder.layers.{i}", table.pop("layer", "model.layers.{i}")), tuple[Rule, ...]()
    if around := table.pop("multi_token_weights", None):
        inside = {ours: theirs for ours, theirs in weights.items() if ours.startswith(".")}
        layer = table.pop("multi_token_layer")
        further = _by_name(_rules(inside | around, "mtp.layers.{i}.transformer_layer", layer))
    return Family(model_type=model_type, rules=_by_name(rules), multi_token=further, **table)


def __getattr__(name: str) -> Family:
    """A family of families.json by its `model_type` in capitals: `families.GEMMA3_TEXT`."""
    if name.lower() not in _tables() or not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _family(name.lower())
