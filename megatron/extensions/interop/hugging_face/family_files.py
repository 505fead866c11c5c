"""Reader of the files that describe Hugging Face families. The files are in the folder `families`, or are files of the
user (--hf-family). This module does not import torch.

The file NAME.json describes the `model_type` NAME. The file contains keys of `Family` and the rules for the family's
weights. A file with the key `like` extends another family or a base. Readers raise ValueError if a key is unknown, if a
value has the wrong type, or if a value refers to an unknown name. The message is one line that states the file, the key
and the rule. If a family file lists the supported values of a key, the first value is the default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from megatron.extensions.interop.hugging_face.config_json.adapters import ADAPTERS
from megatron.extensions.interop.hugging_face.families import FAMILIES, Family, Rule
from megatron.extensions.interop.hugging_face.family_names import config_keys, misspelled, near, parameters
from megatron.training.config.flags import dashed, flags_of, home_of

HERE = files(__package__)
FOLDER = HERE.joinpath("families")

Texts = Mapping[str, str]
SCHEMA: dict[str, Any] = get_type_hints(Family) | {
    "like": str,
    "layer": str,
    "weights": Sequence[str | Texts],
    "adapters": Sequence[str],
    "multi_token_layer": str,
    "multi_token_weights": Texts,
}
"""Maps each key of a file to the type of its value.

`like` is the name of a base or of another family that the file extends. `weights` is a list of tables. An entry can
also be the name of a table in weights.json, or "like", which inserts the tables of the base. Later tables override
earlier tables. `layer` is the prefix that the names of all tensors in a layer share. A multi-token prediction module
consists of a transformer layer and further weights. The layer's tensors have the same names as in other layers, but
with the prefix `multi_token_layer`. `multi_token_weights` lists the weights of the module that do not belong to its
transformer layer.
"""

SCHEMA["keys"] = Mapping[str, str | None]
for _computed in ("model_type", "rules", "multi_token", "file", "class_defaults", "class_names"):
    del SCHEMA[_computed]

OF_OUR_FIELDS = {"keys": True, "powers": False, "fixed": False, "same": False}
"""Tables of a family file that contain names of TransformerConfig fields. For each table, True means that the values in
the table are field names, and False means that the keys are field names."""


@cache
def _shared(name: str) -> dict[str, dict[str, Any]]:
    return json.loads(HERE.joinpath(f"{name}.json").read_text(encoding="utf-8"))


def missing_part(kind: str, name: object) -> str | None:
    """Return the name of the unsupported model feature that a family or setting needs. Return None if no unsupported
    feature is known.

    `kind` is "families" if `name` is a `model_type`, and "settings" if `name` is a config.json key.
    """
    return _shared("missing_parts")[kind].get(name) if isinstance(name, str) else None


def common_keys() -> list[str]:
    """Return the keys that every transformers configuration class has."""
    return list(_shared("class_defaults")["common"])


def __getattr__(name: str) -> Family:
    """Return a built-in family as an attribute of this module. The attribute's name is the `model_type` in upper case,
    such as `family_files.GEMMA3_TEXT`."""
    if not name.isupper() or not FOLDER.joinpath(f"{name.lower()}.json").is_file():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _family(name.lower(), f"families/{name.lower()}.json", _built_in(name.lower()))


def built_in_names() -> list[str]:
    return sorted(path.name.removesuffix(".json") for path in FOLDER.iterdir() if path.name.endswith(".json"))


def is_family_file(value: str) -> bool:
    """Return True if a value of --hf-family is the path of a family file, and False if it is the name of a family."""
    return value.endswith(".json") or "/" in value


def family_to_write(values: Iterable[str]) -> str | None:
    """Return the name of the family that --hf-family selects for exports. Return None if the flag selects no family.
    Call this function only after the family files have been registered. Raises ValueError if the flag contains an
    unknown name or several names."""
    names = [each for each in values if not is_family_file(each)]
    if len(names) > 1:
        rule = "both select the family of exports; give only one NAME. Files must end in .json"
        raise ValueError(f"{' and '.join(names)} {rule}")
    if unknown := [name for name in names if name not in FAMILIES]:
        remedy = f"{near(unknown[0], FAMILIES)}; files with custom families end in .json"
        raise ValueError(f"{unknown[0]}: is not a Hugging Face family{remedy}")
    return names[0] if names else None


def add_families(values: Iterable[str]) -> None:
    """Register families that users define in files. The stem of the file name becomes the name of the family. Raises
    ValueError if a file is invalid."""
    for each in filter(is_family_file, values):
        path = Path(each).expanduser().resolve()
        name = path.stem
        if name not in FAMILIES:
            table = _parsed(path, str(path))
            if (problem := next(misspelled_names(table), None)) is not None:
                raise ValueError(f"{path}: {problem}")
            FAMILIES.register(name, _family(name, str(path), table))
        elif FAMILIES[name].file != str(path):
            remedy = "rename the file: its name is the model_type"
            raise ValueError(f"{path}: model_type {name!r} is already defined by {FAMILIES[name].file}; {remedy}")


def _built_in(name: str) -> dict[str, Any]:
    """Return the contents of a built-in family's file, together with the default values of the family's transformers
    class."""
    table = _parsed(FOLDER.joinpath(f"{name}.json"), f"families/{name}.json")
    own = _shared("class_defaults")["families"].get(name)
    return table if own is None else table | {"class_defaults": own["defaults"], "class_names": own["names"]}


def _parsed(path: Any, shown: str) -> dict[str, Any]:
    """Parse and check a family file. Raises ValueError if the file is missing or invalid."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except FileNotFoundError:
        raise ValueError(f"{shown}: there is no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{shown}: cannot be read as JSON: {' '.join(str(error).split())[:200]}") from None
    problems = _misfit(table) if isinstance(table, dict) else _wrong(table, Mapping[str, Any], "the file")
    if (problem := next(problems, None)) is not None:
        raise ValueError(f"{shown}: {problem}")
    return table


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return found


def _misfit(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each unknown key and each invalid value in a family file."""
    for key, value in table.items():
        if key not in SCHEMA:
            yield f"{key}: is not a key of a family{near(key, SCHEMA)}"
        else:
            yield from _wrong(value, SCHEMA[key], key)
    known = {flag.field for flag in flags_of("model")}
    for key, of_values in OF_OUR_FIELDS.items():
        for theirs, ours in table.get(key, {}).items():
            name = ours if of_values else theirs
            if name is not None and name not in known and home_of(dashed(name)) is None:
                yield f"{key}: {name!r} is not a field of a model{near(name, known)}"
    for each in table.get("weights", ()):
        if isinstance(each, str) and each != "like" and each not in _shared("weights"):
            yield f"weights: there is no table {each!r}{near(each, _shared('weights'))}"
    for each in table.get("adapters", ()):
        if each != "like" and each not in ADAPTERS:
            yield f"adapters: there is no class {each!r}{near(each, ADAPTERS)}"
    like = table.get("like", "any decoder")
    if like not in _shared("bases") and like not in built_in_names():
        yield f"like: {like!r} is neither a base nor a family{near(like, [*_shared('bases'), *built_in_names()])}"


def misspelled_names(table: dict[str, Any]) -> Iterator[str]:
    """Yield a message for each unknown or probably misspelled name in a family file. Built-in families define the known
    names."""
    known = [*_shared("bases").values(), *map(_built_in, built_in_names())]
    keys = {key for each in known for key in config_keys(each)} | {*common_keys()}
    tables = [part for each in known for part in each.get("weights", ()) if isinstance(part, dict)]
    tables += [*_shared("weights").values(), *(each.get("multi_token_weights", {}) for each in known)]
    like = table.get("like")
    base = _whole({"like": like}) if like is not None else {}
    yield from misspelled(table, base, keys, parameters(name for each in tables for name in each))


def _wrong(value: Any, hint: Any, at: str) -> Iterator[str]:
    """Yield error messages if the type of `value` does not match `hint`, its type in SCHEMA."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Mapping and isinstance(value, dict):
        for name, each in value.items():
            yield from _wrong(each, inner[1], f"{at}.{name}")
    elif kind is Sequence and isinstance(value, list):
        for number, each in enumerate(value):
            yield from _wrong(each, inner[0], f"{at}[{number}]")
    elif kind in (Mapping, Sequence) or (
        not inner and hint is not Any and not isinstance(value, (int, float) if hint is float else hint)
    ):
        names = {Mapping: "an object", Sequence: "a list", str: "text", int: "a whole number", float: "a number"}
        word = names.get(kind or hint, "text")
        yield f"{at}: must be {word}, not {json.dumps(value)[:60]}"
    elif inner and value is None and type(None) in inner:
        return
    elif inner:
        # The key may have one of two types. An object is checked against the second type.
        yield from _wrong(value, inner[isinstance(value, dict)], at)


def _whole(table: dict[str, Any]) -> dict[str, Any]:
    """Merge a family's table with its base. The key `like` names the base; a table without this key is returned
    unchanged. If the table defines a key or field, the base's tables `only` and `fixed` no longer apply to it. The
    table also overrides defaults of the base's configuration class.
    """
    own = dict(table)
    like = own.pop("like", None)
    if like is None:
        return own
    base = _whole(_shared("bases")[like] if like in _shared("bases") else _built_in(like))
    for kind in ("weights", "adapters"):
        if kind in own:
            own[kind] = list(chain(*(base.get(kind, ()) if each == "like" else [each] for each in own[kind])))
    keys = own.get("keys", {})
    stated = (
        keys.keys()
        | own.get("values", {}).keys()
        | {*keys.values()}
        | own.get("powers", {}).keys()
        | own.get("equal", {}).keys()
    )
    for kind in ("only", "fixed"):
        base[kind] = {key: value for key, value in base.get(kind, {}).items() if key not in stated}
    if "class_defaults" in own:
        base = {key: value for key, value in base.items() if key not in ("class_defaults", "class_names")}
    elif usual := base.get("class_defaults"):
        stated |= own.get("defaults", {}).keys() | own.get("only", {}).keys()
        base["class_defaults"] = {key: value for key, value in usual.items() if key not in stated - {*keys}}
    return base | {
        key: base[key] | value if key in base and isinstance(value, dict) else value for key, value in own.items()
    }


def _rules(weights: Texts, our_layer: str, their_layer: str) -> Iterator[Rule]:
    """Parse a weights table, which maps parameter names to Hugging Face tensor names, and yield its rules. Each value
    in the table contains the name of a layout and a colon, followed by Hugging Face names separated by spaces. For the
    layout "Same", the name and the colon are omitted. A name that starts with a dot is appended to the prefix of its
    layer: `our_layer` or `their_layer`. `*` means both weight and bias.
    """

    def whole(name: str, layer: str, kind: str) -> str:
        return (layer + name if name.startswith(".") else name).replace("*", kind)

    for ours, theirs in weights.items():
        layout, _, names = theirs.rpartition(": ")
        for kind in ("weight", "bias") if "*" in ours else ("",):
            listed = tuple(whole(name, their_layer, kind) for name in names.split())
            yield Rule(whole(ours, our_layer, kind), listed, layout or "Same")


def _by_name(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Remove rules that a later rule for the same parameter overrides."""
    return tuple({rule.ours: rule for rule in rules}.values())


def _family(model_type: str, file: str, own: dict[str, Any]) -> Family:
    """Create a Family from the table in a family file. Raises ValueError if a key is missing."""
    table = _whole(own)
    if missing := [key for key in ("architecture", "prefix", "weights", "keys", "fixed") if key not in table]:
        raise ValueError(f"{file}: {missing[0]}: is missing; add it, or name a base in like")
    # Keys in JSON are always strings, also if they denote booleans or null.
    booleans = {"true": True, "false": False, "null": None}
    values = {
        key: {booleans.get(theirs, theirs): ours for theirs, ours in each.items()}
        for key, each in table.pop("values", {}).items()
    }
    usual = {key: next(iter(legal)) for key, legal in (table.get("only", {}) | values).items()}
    weights: dict[str, str] = {}
    for each in table.pop("weights"):
        weights |= _shared("weights")[each] if isinstance(each, str) else each
    rules, further = _rules(weights, "decoder.layers.{i}", table.pop("layer", "model.layers.{i}")), tuple[Rule, ...]()
    if around := table.pop("multi_token_weights", None):
        inside = {ours: theirs for ours, theirs in weights.items() if ours.startswith(".")}
        layer = table.pop("multi_token_layer")
        further = _by_name(_rules(inside | around, "mtp.layers.{i}.transformer_layer", layer))
    return Family(
        model_type=model_type,
        file=file,
        rules=_by_name(rules),
        multi_token=further,
        values=values,
        keys={theirs: ours for theirs, ours in table.pop("keys").items() if ours is not None},
        defaults=usual | table.pop("defaults", {}),
        adapters=[ADAPTERS[each] for each in table.pop("adapters", ())],
        **table,
    )
