"""Write a table with the default values of the configuration classes in the installed transformers.

    python -m tests.extensions.hugging_face.class_defaults

If a key is missing from a config.json, the default of the configuration class applies. The table contains the defaults
of every built-in family, and the alternative key names that the transformers class of the family accepts.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import transformers

from megatron.extensions import load
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.family_files import HERE

TABLE = HERE.joinpath("class_defaults.json")
COMMON = {each.name for each in dataclasses.fields(transformers.PreTrainedConfig)}
"""Keys that all configuration classes have. None of these keys describes the layers of a model."""


def defaults_of(cls: Any) -> dict[str, Any]:
    """Return the default values of a class for keys that are missing from a config.json. The defaults do not include
    values that the class derives from other keys."""
    found = {}
    for each in dataclasses.fields(cls):
        if each.name not in COMMON:
            made = each.default_factory is not dataclasses.MISSING
            found[each.name] = each.default_factory() if made else each.default
    if "rope_parameters" in found and isinstance(cls.default_theta, float):
        found.setdefault("rope_theta", cls.default_theta)
    return found


def installed() -> dict[str, Any]:
    """Return the table for the installed version of transformers."""
    classes = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    families = {
        name: {"defaults": defaults_of(classes[name]), "names": dict(classes[name].attribute_map)}
        for name in sorted(FAMILIES)
        if name in classes
    }
    return {"transformers": transformers.__version__, "common": sorted(COMMON), "families": families}


def main() -> None:
    load()
    table = installed()
    families = table.pop("families")
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in families.items())
    TABLE.write_text(f'{json.dumps(table)[:-1]}, "families": {{\n{rows}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
