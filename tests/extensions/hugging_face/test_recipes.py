"""Test that each recipe for a published model is valid. Each parameter of the recipe's model matches a parameter of the
published model class."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.interop.hugging_face.write_config import config_to_hf
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.cli.test_scripts import ROOT, run

transformers = pytest.importorskip("transformers")

PUBLISHED = {
    (recipe, size): tuple(of_size)
    for recipe, sizes in yaml.safe_load(Path(__file__).with_name("recipes.yaml").read_text()).items()
    for size, of_size in sizes.items()
}
"""Number of ranks, family and number of parameters of each published model, keyed by (recipe, size)."""


def test_every_recipe_is_listed() -> None:
    scripts = {path.stem for path in (ROOT / "scripts/recipes").glob("*.sh")} - {"recipe"}
    assert scripts == {recipe for recipe, _ in PUBLISHED}


def published_model(settings: Any) -> torch.nn.Module:
    """Return the transformers model for a configuration. For Step-3.5, return the text model, which has no output
    layer."""
    if settings.model_type == "nemotron_h":
        # initial step sizes can be drawn only if the minimum is above 0
        settings.time_step_min = settings.time_step_max
    if settings.model_type != "step3p5":
        model = transformers.AutoModelForCausalLM.from_config(settings)
        # remove the unused weights of zero-computation experts, which only the transformers class has
        if settings.model_type == "longcat_flash":
            for experts in (layer.mlp.experts for layer in model.model.layers):
                experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[: settings.n_routed_experts])
        return model
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    head = torch.nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
    return torch.nn.ModuleList([Step3p7TextModel(settings), head])


@pytest.mark.parametrize(("recipe", "size"), PUBLISHED, ids=[" ".join(key) for key in PUBLISHED])
def test_each_recipe_builds_the_published_model(recipe: str, size: str) -> None:
    ranks, family, parameters = PUBLISHED[recipe, size]
    done = run("bash", f"scripts/recipes/{recipe}.sh", SIZE=size, LAUNCH="echo")
    assert done.returncode == 0, done.stdout + done.stderr
    launched, *flags = shlex.split(done.stdout.splitlines()[-1])
    config = resolve(parse_args(flags), ranks)
    assert launched == "pretrain_gpt.py" and validate(config, ranks) == []
    # transformers' classes do not have multi-token prediction modules.
    model = replace(config.model, mtp_num_layers=None)
    padding = (model.padded_vocab_size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    assert count_parameters(model).total - padding == parameters
    with torch.device("meta"):
        settings = transformers.AutoConfig.for_model(**config_to_hf(model, family))
        theirs = published_model(settings)
    trained = (parameter for parameter in theirs.parameters() if parameter.requires_grad)
    assert sum(parameter.numel() for parameter in trained) == parameters


def test_dry_run_needs_no_world_size() -> None:
    done = run("bash", "scripts/recipes/smollm3.sh", "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parameters 3,075,098,624\n" in done.stdout and "DP 192" in done.stdout


@pytest.mark.parametrize(("recipe", "sizes"), [("qwen3", "8b, 30b-a3b and 235b-a22b"), ("kimi_k2", "1t")])
def test_unknown_size_is_refused(recipe: str, sizes: str) -> None:
    done = run("bash", f"scripts/recipes/{recipe}.sh", SIZE="7b")
    assert done.returncode == 2
    assert done.stderr == f"SIZE=7b: the sizes of this recipe are {sizes}\n"
