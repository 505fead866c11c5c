"""Recipes of published models: each is legal, and its model is that of the published class, parameter by parameter."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.hugging_face.write_config import config_to_hf
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.cli.test_scripts import ROOT, run

transformers = pytest.importorskip("transformers")

# Recipe, size -> ranks, family, parameters of the published model.
PUBLISHED = {
    ("llama3", "8b"): (128, "llama", 8_030_261_248),
    ("llama3", "70b"): (512, "llama", 70_553_706_496),
    ("llama3", "405b"): (8192, "llama", 405_853_388_800),
    ("qwen3", "8b"): (128, "qwen3", 8_190_735_360),
    ("qwen3", "30b-a3b"): (256, "qwen3_moe", 30_532_122_624),
    ("qwen3", "235b-a22b"): (1024, "qwen3_moe", 235_093_634_560),
    ("qwen3_next", "80b-a3b"): (256, "qwen3_next", 79_674_391_296),
    ("olmo3", "7b"): (512, "olmo3", 7_298_011_136),
    ("olmo3", "32b"): (1024, "olmo3", 32_233_522_176),
    ("deepseek_v3", "671b"): (2048, "deepseek_v3", 671_026_404_352),
    ("kimi_k2", "1t"): (2048, "deepseek_v3", 1_026_408_209_408),
    ("smollm3", "3b"): (384, "smollm3", 3_075_098_624),
    ("apertus", "8b"): (512, "apertus", 8_053_338_176),
    ("apertus", "70b"): (2048, "apertus", 70_599_864_480),
    ("glm4_5", "355b-a32b"): (1024, "glm4_moe", 352_797_814_784),
    ("glm4_5", "106b-a12b"): (512, "glm4_moe", 106_852_245_504),
    # Of Ling 2.0 transformers has no class; GLM's has the same layers.
    ("ling", "mini"): (128, "glm4_moe", 16_255_638_528),
    ("ling", "flash"): (512, "glm4_moe", 102_889_697_280),
    ("ling", "1t"): (2048, "glm4_moe", 999_705_309_184),
    ("minimax_m2", "230b-a10b"): (512, "minimax_m2", 228_689_748_992),
    ("gpt_oss", "20b"): (128, "gpt_oss", 20_914_757_184),
    ("gpt_oss", "120b"): (512, "gpt_oss", 116_829_156_672),
    ("llama4", "scout"): (512, "llama4_text", 107_769_861_120),
    ("llama4", "maverick"): (1024, "llama4_text", 400_711_848_960),
    ("k_exaone", "236b-a23b"): (512, "exaone_moe", 236_571_150_336),
    ("mimo_v2", "309b-a15b"): (1024, "mimo_v2_flash", 308_778_768_832),
    ("step3_5", "196b-a11b"): (512, "step3p5", 196_956_118_272),
    ("trinity", "mini"): (512, "afmoe", 26_123_970_560),
    ("trinity", "nano"): (512, "afmoe", 6_119_996_416),
}


def test_every_recipe_is_listed() -> None:
    scripts = {path.stem for path in (ROOT / "scripts/recipes").glob("*.sh")} - {"recipe"}
    assert scripts == {recipe for recipe, _ in PUBLISHED}


def published_model(settings: Any) -> torch.nn.Module:
    """The model of a configuration of transformers. Of Step-3.5 there is one of text without a head."""
    if settings.model_type != "step3p5":
        return transformers.AutoModelForCausalLM.from_config(settings)
    from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

    head = torch.nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
    return torch.nn.ModuleList([Step3p7TextModel(settings), head])


@pytest.mark.parametrize(("recipe", "size"), PUBLISHED, ids=[" ".join(key) for key in PUBLISHED])
def test_model_is_the_published_one(recipe: str, size: str) -> None:
    ranks, family, parameters = PUBLISHED[recipe, size]
    done = run("bash", f"scripts/recipes/{recipe}.sh", SIZE=size, LAUNCH="echo")
    assert done.returncode == 0, done.stdout + done.stderr
    launched, *flags = shlex.split(done.stdout.splitlines()[-1])
    config = resolve(parse_args(flags), ranks)
    assert launched == "pretrain_gpt.py" and validate(config, ranks) == []
    model = replace(config.model, mtp_num_layers=None)  # of which their classes know nothing
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
