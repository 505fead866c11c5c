"""Learning rates and weight decays of an MLP and a transformer equal those of Microsoft's package mup 1.0.0.

`mup_1_0_0.json` holds the package's values. If the package `mup` is installed, the test also compares the results with
the package itself. In this case, `python -m tests.extensions.mup.test_package` can write the file again.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.param_meta import ParamMeta, Role
from megatron.extensions import load
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from tests.tiny import TINY

RECORD = Path(__file__).with_name("mup_1_0_0.json")
LR, DECAY = 0.5, 0.25
WIDTH = "--use-mup --mup-base-hidden-size 16"
MODELS = {"tied": "--qk-layernorm", "untied": "--untie-embeddings-and-output-weights --swiglu --add-output-layer-bias"}
OPTIMIZERS = ("adam", "sgd")
MLP: dict[str, Role] = {"0": "embedding", "2": "hidden", "4": "output"}
"""Role of each linear layer of an MLP with 8 inputs and 3 outputs, keyed by the layer's index."""

Rates = dict[str, list[float]]


def config_of(flags: str, hidden: int) -> RunConfig:
    """Return a configuration with the hidden size `hidden`. The head size stays the same."""
    sizes = f"--hidden-size {hidden} --num-attention-heads {hidden // 4} --ffn-hidden-size {2 * hidden}"
    decays = "--weight-decay-on matrices embeddings norms biases"
    return resolve_legal(parse_args(f"{TINY} {sizes} {WIDTH} {decays} {flags}".split()), 1)


def mlp(width: int) -> nn.Sequential:
    layers = nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    return nn.Sequential(*layers)


def metas_of(model: str) -> dict[str, ParamMeta]:
    """Return the parameters of a model at four times the width of the base model."""
    if model != "mlp":
        return {name: meta for name, (_, meta) in GPTModel(config_of(MODELS[model], 64).model).named_metas().items()}
    found = {}
    for name, parameter in mlp(64).named_parameters():
        layer, kind = name.split(".")
        role = MLP[layer] if kind == "weight" else "bias"
        own = "output_layer.bias" if name == "4.bias" else name
        # the shape is reversed, because an embedding table has one row per input
        shape = tuple(parameter.shape)[:: -1 if role == "embedding" else 1]
        found[name] = ParamMeta(own, shape, role=role)
    return found


def ours(model: str, optimizer: str) -> Rates:
    """Return the learning rate and the weight decay that this program computes, keyed by parameter name."""
    config = config_of(f"{MODELS.get(model, '')} --optimizer {optimizer}", 64).optimizer
    groups = {name: config.group_of(meta) for name, meta in metas_of(model).items()}
    return {name: [group.lr(LR, None), group.decay(DECAY)] for name, group in groups.items()}


def as_matrix(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a weight as [out, in], which the `mup` package expects. If a weight has more than two dims,
    the leading dims are indices of linear maps and are merged into the output dim."""
    return tuple(weight.flatten(0, -2).shape) if weight.ndim > 2 else tuple(weight.shape)


def by_package(model: str, optimizer: str) -> Rates:
    """Return the learning rate and the weight decay that the `mup` package computes, keyed by parameter name. The
    package compares the parameter shapes of two models."""
    package: Any = import_module("mup")
    if model == "mlp":
        base, wide = (dict(mlp(width).named_parameters()) for width in (16, 64))
    else:
        models = (GPTModel(config_of(MODELS[model], hidden).model) for hidden in (16, 64))
        base, wide = ({name: each for name, (each, _) in one.named_metas().items()} for one in models)
    inf_shapes = import_module("mup.infshape")
    for name, parameter in wide.items():
        sizes = zip(*(as_matrix(each) for each in (base[name], parameter)), strict=True)
        parameter.infshape = inf_shapes.InfShape(
            inf_shapes.InfDim(None if small == large else small, large) for small, large in sizes
        )
    names = {id(parameter): name for name, parameter in wide.items()}
    build = {"adam": package.MuAdamW, "sgd": package.MuSGD}[optimizer]
    groups = build(list(wide.values()), lr=LR, weight_decay=DECAY).param_groups
    return {names[id(each)]: [group["lr"], group["weight_decay"]] for group in groups for each in group["params"]}


CASES = [(model, optimizer) for model in ("mlp", *MODELS) for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("model", "optimizer"), CASES)
def test_rates_and_decays_match_the_package(model: str, optimizer: str) -> None:
    recorded: Rates = json.loads(RECORD.read_text())[f"{model} {optimizer}"]
    assert ours(model, optimizer) == recorded
    assert find_spec("mup") is None or by_package(model, optimizer) == recorded


def test_logits_have_the_same_factor_as_in_the_package() -> None:
    """The output layer of the package (`MuReadout`) multiplies the logits by the base width divided by the width. The
    initial values of the layer's weight do not depend on the width."""
    config = config_of(MODELS["untied"], 64)
    assert config.model.logits_scaling == 4
    (meta,) = (each for each in metas_of("untied").values() if each.role == "output")
    (rule,) = config.optimizer.parameter_rules
    assert meta.init is not None and rule.initial(meta, meta.init) == meta.init
    assert torch.isclose(torch.tensor(config.model.attention_scale), torch.tensor(1 / 4))


if __name__ == "__main__":
    load()
    found = {f"{model} {optimizer}": by_package(model, optimizer) for model, optimizer in CASES}
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
