"""Compare every causal language model of the installed transformers with this program's version of the model. The
models are tiny and random.

    python -m tests.extensions.hugging_face.sweep                     # all, and the number of each verdict
    python -m tests.extensions.hugging_face.sweep glm4 olmo --draws 50 --seed 3

The verdict "both ways" means that logits and gradients in fp64 are equal to 1e-9, and that a round trip changes no byte
of the weights and no setting. "in only" means that the model cannot be exported. "refused" is followed by the
unsupported feature. "no target" means that the model is not meant for pretraining, and is followed by the reason. More
configurations of each family are drawn with valid but unusual values. Each drawn configuration must either be imported
exactly or be refused. Any other outcome has the verdict "WRONG", and the exit code is then 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.extensions import load
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.write_config import config_to_hf, settings_of
from tests.extensions.hugging_face.hf_exact import fp64, model_with, transformers, weights, wrong_gradients
from tests.extensions.hugging_face.whole_models import model_of, there_and_back

KNOWN = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
BOTH, IN_ONLY, REFUSED, NO_TARGET, WRONG, ILLEGAL = (
    *("both ways", "in only", "refused", "no target", "WRONG"),
    *("refused by transformers",),
)


def tiny(model_type: str) -> dict[str, Any]:
    """Return the settings of a family's tiny model. These are the common sizes for which the family's configuration has
    keys, and the special settings of the family."""
    usual = transformers.AutoConfig.for_model(model_type)
    known = usual.to_dict().keys() | type(usual).attribute_map.keys()
    sizes = {key: value for key, value in TABLES["sizes"].items() if key in known}
    return sizes | TABLES["families"].get(model_type, {})


def verdict(model_type: str, settings: Mapping[str, Any], written: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """Compare a transformers model with this program's model, and return the verdict and a text with details. `written`
    is the config.json that this program reads. The default is the config.json that transformers writes."""
    try:
        stated = written or transformers.AutoConfig.for_model(model_type, **settings).to_dict()
    except Exception as error:
        return ILLEGAL, _line(error)
    try:
        config = config_from_hf(stated)
    except ValueError as error:
        return REFUSED, _line(error).partition(": ")[2]
    try:
        theirs, tokens = model_with(model_type, settings), torch.randint(settings.get("vocab_size", 83), (2, 24))
        with torch.no_grad():
            expected = theirs(tokens, use_cache=False).logits
    except Exception as error:
        return ILLEGAL, _line(error)
    try:
        read = there_and_back(weights(theirs), config, model_type)
    except ValueError as error:
        return REFUSED, _line(error).partition(": ")[2]
    try:
        mine = model_of(read, config)
        with torch.no_grad():
            error = (mine.logits(None, Batch.of_tokens(tokens)) - expected).norm() / expected.norm()
        if not error < 1e-9:
            return WRONG, f"logits differ by {error:.1e}"
        back = _way_back(model_type, config, theirs, tokens, expected)
        wrong = wrong_gradients(theirs, mine, tokens, model_type)
        return (WRONG, f"gradient of {', '.join(wrong[:3])}") if wrong else back
    except Exception as error:
        return WRONG, f"{type(error).__name__}: {_line(error)}"


def _way_back(model_type: str, config: Any, theirs: Any, tokens: Tensor, expected: Tensor) -> tuple[str, str]:
    try:
        written = config_to_hf(config, model_type)
    except ValueError as error:
        return IN_ONLY, _line(error)
    read = config_from_hf(written)
    if settings_of(read) != settings_of(config):
        return WRONG, "its config.json is read as another model"
    written = {key: value for key, value in written.items() if key not in ("architectures", "model_type")}
    again = model_with(model_type, written | {"pad_token_id": 0})
    if again.state_dict().keys() != theirs.state_dict().keys():
        return WRONG, "its config.json has other weights"
    again.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        error = (again(tokens, use_cache=False).logits - expected).norm() / expected.norm()
    return (BOTH, "") if error < 1e-9 else (WRONG, f"logits of the written config.json differ by {error:.1e}")


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def draws(model_type: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield settings in which one to three keys differ from the tiny model. The new values are other valid values,
    inverted booleans or scaled floats."""
    chance = random.Random(f"{seed} {model_type}")
    usual = transformers.AutoConfig.for_model(model_type, **tiny(model_type)).to_dict()
    keys = [key for key in usual if key not in TABLES["idle"] and _values(key, usual[key])]
    for _ in range(count):
        chosen = chance.sample(keys, chance.choice((1, 1, 2, 3)))
        yield {key: chance.choice(_values(key, usual[key])) for key in chosen}


def _values(key: str, usual: Any) -> list[Any]:
    """Return alternative values for a key of config.json."""
    if key in TABLES["values"]:
        return deepcopy([value for value in TABLES["values"][key] if value != usual])
    if isinstance(usual, bool):
        return [not usual]
    return [usual * 0.75, usual * 1.5] if isinstance(usual, float) else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="model_type (default: all)")
    parser.add_argument("--draws", type=int, default=0, help="unusual configurations of each family that comes in")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    load()
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = args.families or list(KNOWN)
    reasons = {name: reason for reason, several in TABLES["no target"].items() for name in several}
    counts, drawn = Counter[str](), Counter[str]()
    print(f"seed {args.seed}")
    with fp64():
        for name in names:
            found, text = (NO_TARGET, reasons[name]) if name in reasons else verdict(name, tiny(name))
            counts[found] += 1
            print(f"{name:28} {found:10} {text}", flush=True)
            for changes in draws(name, args.draws, args.seed) if name in FAMILIES else ():
                found, text = verdict(name, tiny(name) | changes)
                drawn[found] += 1
                if found in (WRONG, IN_ONLY) or args.families:
                    print(f"    {changes}: {found} {text}", flush=True)
    for title, each in (("families", counts), ("drawn configurations", drawn)):
        print(f"{title}: {', '.join(f'{number} {what}' for what, number in each.most_common()) or 'none'}")
    return 1 if counts[WRONG] or drawn[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
