"""Check that a config.json without some of its keys is read as transformers reads it.

    python -m tests.extensions.hugging_face.missing_keys                   # each key of every family in turn
    python -m tests.extensions.hugging_face.missing_keys qwen2 --draws 50  # and sets of keys, of drawn configurations

This program reads the incomplete config.json, and the complete config.json that transformers makes from the remaining
keys. The fields of the two resulting models are compared. If the remaining keys describe a different model that is
small enough to run, logits and gradients are also compared, as in `sweep`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.write_config import settings_of
from tests.extensions.hugging_face import sweep
from tests.extensions.hugging_face.hf_exact import fp64, transformers

OF_NO_MODEL = ("model_type", "transformers_version", "architectures", "dtype", "torch_dtype")
TRAINED_WITH = ("attention_dropout", "hidden_dropout", "init_method_std")
"""Fields of a config.json that affect only training, not the outputs of the model."""

SMALL = 200_000
"""Largest number of parameters of a model whose logits are compared."""


def whole(model_type: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json that transformers writes for the given settings. Exceptions that transformers raises are
    not caught."""
    settings = {key: value for key, value in settings.items() if key not in OF_NO_MODEL}
    return transformers.AutoConfig.for_model(model_type, **settings).to_dict() | {"model_type": model_type}


def tiny(model_type: str, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    return whole(model_type, sweep.tiny(model_type) | dict(changes or {}))


def derived(model_type: str) -> set[str]:
    """Return the keys that the family's class derives from other keys."""
    fields = dataclasses.fields(transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type])
    return {each.name for each in fields if each.default is None}


def deletions(model_type: str, stated: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield one tuple (deleted key, remaining config.json) for each deletion. Each key is deleted in turn, including
    keys of nested objects. Keys of the top level are deleted from the complete file, and from a file without the keys
    that the class derives from others."""
    for key, inner in _objects(stated):
        yield f"{key}.{inner}", _without_inner(stated, key, inner)
    for others in (set[str](), derived(model_type) & stated.keys()):
        for key in sorted(stated.keys() - {*OF_NO_MODEL} - others):
            yield key, {each: value for each, value in stated.items() if each != key and each not in others}


def _objects(stated: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield one tuple (key, inner key) for each key of each object that is nested in a config.json."""
    return ((key, inner) for key, value in sorted(stated.items()) if isinstance(value, dict) for inner in value)


def _without_inner(stated: Mapping[str, Any], key: str, inner: str) -> dict[str, Any]:
    return {**stated, key: {each: value for each, value in stated[key].items() if each != inner}}


def drawn_deletions(model_type: str, count: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw configurations with unusual values, delete random keys, and yield the deleted and the remaining keys."""
    chance = random.Random(f"{seed} {model_type}")
    for changes in sweep.draws(model_type, count, seed):
        try:
            stated = tiny(model_type, changes)
        except Exception:
            continue  # transformers rejects the drawn values, so they are skipped
        share, open_keys = chance.choice((0.1, 0.3, 0.6)), derived(model_type)
        removable = [key for key in stated if key not in OF_NO_MODEL and key not in changes]
        chosen = [key for key in removable if chance.random() < (max(share, 0.5) if key in open_keys else share)]
        left = {key: value for key, value in stated.items() if key not in chosen}
        for key, inner in _objects(left):
            if chance.random() < 0.2:
                left = _without_inner(left, key, inner)
                chosen.append(f"{key}.{inner}")
        yield f"{changes} without {chosen}", left


def difference(
    model_type: str, left: Mapping[str, Any], compared: Mapping[str, Any] | None = None, logits: bool = True
) -> str:
    """Compare this program's model for an incomplete config.json with the model that transformers builds. Return a
    description of the difference, or "" if there is none. `compared` is a complete config.json for which the logits of
    both models are known to be equal."""
    try:
        meant = whole(model_type, left)
    except Exception:
        return ""  # transformers refuses it
    expected, found = _read(meant), _read(left)
    if isinstance(expected, str) or isinstance(found, str):
        same = isinstance(expected, str) == isinstance(found, str)
        return (
            "" if same else f"{found if isinstance(found, str) else 'is read'}; the whole file: {str(expected)[:200]}"
        )
    names = [name for name, value in expected[0].items() if not _same(found[0].get(name), value)]
    if names:
        return ", ".join(f"{name} = {found[0].get(name)!r}, not {expected[0][name]!r}" for name in names)
    if not logits or meant == compared or count_parameters(expected[1]).total > SMALL:
        return ""
    settings = {key: value for key, value in left.items() if key not in OF_NO_MODEL}
    verdict, text = sweep.verdict(model_type, settings, {**left})
    return f"{verdict} {text}" if verdict == sweep.WRONG else ""


def _read(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], Any] | str:
    """Return two values for a config.json: a dictionary of the model settings that this program reads from it, and the
    model configuration. If the config.json is refused, return the error message instead."""
    try:
        config = config_from_hf(hf_config)
        return settings_of(config) | {name: getattr(config, name) for name in TRAINED_WITH}, config
    except ValueError as error:
        return str(error)


def _same(one: Any, other: Any) -> bool:
    numbers = isinstance(one, float) and isinstance(other, float)
    return math.isclose(one, other, rel_tol=1e-12) if numbers else one == other


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model_type (default: all)")
    parser.add_argument("--draws", type=int, default=0, help="drawn configurations of each family")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    counts = Counter[str]()
    print(f"seed {args.seed}")
    with fp64():
        for name in args.families or [each for each in FAMILIES if each in sweep.KNOWN]:
            stated = tiny(name)
            cases = [*deletions(name, stated), *drawn_deletions(name, args.draws, args.seed)]
            for what, left in cases:
                text = difference(name, left, stated)
                counts["different" if text else "equal"] += 1
                if text:
                    print(f"{name} {what}: {text[:400]}", flush=True)
            print(f"{name}: {len(cases)} files", flush=True)
    print(json.dumps(counts))
    return 1 if counts["different"] else 0


if __name__ == "__main__":
    sys.exit(main())
