"""Check exports of randomly drawn models. Each export must load back as the same model, bit for bit, or be refused with
a reason.

    python -m tests.extensions.hugging_face.drawn_exports --draws 200 --seed 3

For each draw, a tiny model of this program or of a Hugging Face family is chosen, and up to three of its flags are set
to other valid values. Every family that can express the settings of the drawn model must export it. Weights and
settings must be unchanged when the export is read, and the resulting model must compute the same logits bit for bit.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import model_states, stage_metas
from megatron.extensions import load
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.write_config import choose_family, config_to_hf
from megatron.training.config.flags import Flag, flags_of, run_of, value_of, with_fields
from megatron.training.config.validation import validate
from tests.extensions.hugging_face import sweep
from tests.extensions.hugging_face.hf_exact import transformers
from tests.extensions.hugging_face.whole_models import from_hf, model_of, to_hf
from tests.gpt_cases import TABLE, models_in

NUMBERS = (1, 2, 3, 4, 8, 16, 0.25, 0.5)
EXPORTED, REFUSED = "exported", "refused"


@cache
def starts() -> dict[str, TransformerConfig]:
    """Return tiny models, keyed by name: the models in fixtures/models.yaml, and one model for each family of the
    installed transformers."""
    found = {name: model for table in TABLE for name, model in models_in(table).items()}
    for family in FAMILIES:
        if family in sweep.KNOWN:
            stated = transformers.AutoConfig.for_model(family, **sweep.tiny(family)).to_dict()
            try:
                found[f"family {family}"] = replace(config_from_hf(stated), seq_length=24)
            except ValueError:
                continue  # the extension that implements the family's layers is not installed
    return found


def draws(count: int, seed: int) -> Iterator[tuple[str, TransformerConfig]]:
    """Yield randomly drawn valid models. Each model comes with a text that describes how the model was drawn."""
    chance = random.Random(seed)
    while count:
        name = chance.choice(list(starts()))
        config, changes = starts()[name], dict[str, object]()
        for flag in chance.sample(flags_of("model"), chance.choice((0, 1, 1, 2, 3))):
            if values := list(_values(flag, value_of(run_of(config), flag))):
                changes[flag.field] = chance.choice(values)
        config = with_fields(config, changes)
        if is_legal(config):
            count -= 1
            yield f"{name} {changes}", config


def _values(flag: Flag, now: object) -> Iterator[object]:
    """Yield possible values of a flag, except its current value."""
    if flag.takes_several:
        return
    elif flag.kind is bool:
        yield not now
    elif flag.spec.choices:
        yield from (value for value in flag.spec.choices if value != now)
    elif flag.kind in (int, float):
        yield from (value for value in map(flag.kind, NUMBERS) if value != now)


def is_legal(config: TransformerConfig) -> bool:
    """Return True if no rule refuses the flags of a model."""
    of_models = {flag.name for flag in flags_of("model")}
    try:
        return not any(problem.flag in of_models for problem in validate(run_of(config), 1))
    except ArithmeticError:
        return False  # some sizes are not divisible, which rules for other flags report in a complete run


def weights_of(config: TransformerConfig) -> dict[str, Tensor]:
    """Return random values for all parameters and states of a model, keyed by name. States with an integer dtype
    contain indices of experts."""
    generator = torch.Generator().manual_seed(5)
    found = dict[str, Tensor]()
    for meta, dtype in (*((meta, torch.float64) for meta in stage_metas(config)), *states_of(config)):
        if dtype.is_floating_point:
            drawn = torch.randn(meta.global_shape, generator=generator, dtype=torch.float64) * 0.3
        else:
            drawn = torch.randint(config.num_experts or 1, meta.global_shape, generator=generator)
        found[meta.name] = drawn.to(dtype)
    return found


def states_of(config: TransformerConfig) -> list[tuple[ParamMeta, torch.dtype]]:
    return [(meta, getattr(torch, dtype)) for meta, dtype in model_states(config)]


def verdicts(config: TransformerConfig) -> Iterator[tuple[str, str]]:
    """Yield one tuple (family, verdict) for the model's export to each family. The verdict is "exported", "refused", or
    a description of the fault."""
    try:
        choose_family(config)
    except ValueError:
        yield "", REFUSED
        return
    parameters = weights_of(config)
    for family in FAMILIES:
        try:
            written = config_to_hf(config, family)
        except ValueError:
            continue
        try:
            yield family, difference(config, family, written, parameters)
        except Exception as error:
            yield family, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def difference(config: TransformerConfig, family: str, written: dict[str, Any], parameters: dict[str, Tensor]) -> str:
    """Read an export back, and describe how the resulting model differs from `config`. Return `EXPORTED` if there is no
    difference."""
    try:
        tensors = to_hf(parameters, config, family)
    except ValueError as error:
        return f"its settings are written, and its weights are refused: {error}"
    read = replace(
        config_from_hf(written),
        mtp_num_layers=config.mtp_num_layers,
        pad_vocab_size_to=config.padded_vocab_size,
        seq_length=config.seq_length,
    )
    back = from_hf(tensors, read, family)
    missing = sorted(name for name in parameters.keys() - back.keys() if not name.startswith("mtp."))
    if missing or back.keys() - parameters.keys():
        return f"other parameters: {missing or sorted(back.keys() - parameters.keys())}"
    for name, value in back.items():
        whole = config.vocab_size if name.startswith(("embedding.word", "output_layer")) else None
        if not torch.equal(value[:whole], parameters[name][:whole]):
            return f"{name} differs"
    found, expected = logits(read, back), logits(config, parameters)
    return EXPORTED if torch.equal(found, expected) else f"logits differ by {(found - expected).abs().max():.1e}"


def logits(config: TransformerConfig, parameters: dict[str, Tensor]) -> Tensor:
    """Return the logits of a random text, computed by the model without multi-token prediction modules."""
    model = model_of(parameters, replace(config, mtp_num_layers=None))
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size or 0, (2, min(12, config.seq_length)), generator=generator)
    with torch.no_grad():
        return model.logits(None, Batch.of_tokens(tokens))[..., : config.vocab_size].nan_to_num(7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    load()
    counts = Counter[str]()
    for text, config in draws(args.draws, args.seed):
        for family, verdict in verdicts(config):
            counts[verdict if verdict in (EXPORTED, REFUSED) else "WRONG"] += 1
            if verdict not in (EXPORTED, REFUSED):
                print(f"{family} of {text}: {verdict}", flush=True)
    print(*(f"{count} {verdict}" for verdict, count in counts.items()), sep=", ")
    return 1 if counts["WRONG"] else 0


if __name__ == "__main__":
    sys.exit(main())
