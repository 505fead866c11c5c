"""Test that weights and settings of Hugging Face families convert in both directions. Error messages name the settings
that a family cannot express."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.interop.hugging_face import family_files
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.family_files import add_families, misspelled_names
from megatron.extensions.interop.hugging_face.folder import HFFolder
from megatron.extensions.interop.hugging_face.named_layouts import LAYOUTS
from megatron.extensions.interop.hugging_face.read_config import config_from_hf, text_model
from megatron.extensions.interop.hugging_face.weights import HFWeights, placements
from megatron.extensions.interop.hugging_face.write_config import config_to_hf
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import flags_of
from tests.extensions.hugging_face import sweep
from tests.extensions.hugging_face.hf_exact import model_with, random_model, weights
from tests.extensions.hugging_face.hf_models import BASES, CASES, SIZES, TABLES, YARN, assert_same_weights
from tests.extensions.hugging_face.whole_models import from_hf, there_and_back, to_hf
from tests.gpt_cases import FP64, GPT, LLAMA, STYLES
from tests.moe_cases import MIXTRAL
from tools import convert_checkpoint

transformers = pytest.importorskip("transformers")


def test_published_files_without_some_keys_are_read() -> None:
    llama2 = config_from_hf(TABLES["published"]["llama2"])
    assert (llama2.query_groups, llama2.head_dim, llama2.rotary_base) == (32, 128, 10000.0)
    assert not llama2.tied_embeddings and not llama2.group_query_attention


def test_published_files_of_exaone4_without_windows_are_read() -> None:
    """If EXAONE 4 has no attention windows, all layers have a rotary embedding."""
    full = {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3}
    config = config_from_hf({"model_type": "exaone4", **full, "sliding_window_pattern": "LLLG"})
    assert config.rope_pattern == (True, True, True) and config.window_size is None
    written = config_to_hf(config, "exaone4")
    assert (written["sliding_window"], written["layer_types"]) == (None, full["layer_types"])


def test_published_files_of_bloom_are_read() -> None:
    """BLOOM uses different key names for sizes, and its training settings are ignored."""
    bloom = config_from_hf(TABLES["published"]["bloom"])
    assert (bloom.head_dim, bloom.ffn_size, bloom.seq_length) == (128, 57344, 2048)
    assert count_parameters(bloom).total == 176_247_271_424


def test_names_of_the_bare_decoder_and_buffers_are_understood() -> None:
    theirs = random_model("gpt2")
    config = config_from_hf(theirs.config.to_dict())
    bare = {name.removeprefix("transformer."): value for name, value in weights(theirs).items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    found, expected = from_hf(bare, config, "gpt2"), from_hf(theirs.state_dict(), config, "gpt2")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("family", "name", "box"),
    [
        ("qwen3_5_text", "in_proj", (slice(1, 2), slice(4, 40), slice(3, 9))),
        ("mamba2", "in_proj", (slice(1, 2), slice(3, 45), slice(2, 9))),
        ("codegen", "linear_qkv", (slice(1, 3), slice(1, 3), slice(2, 5), slice(0, 9))),
    ],
)
def test_a_part_of_a_parameter_is_read_from_its_tensors(family: str, name: str, box: tuple[slice, ...]) -> None:
    """The tested parameters consist of several pieces of one Hugging Face tensor, or of blocks of heads."""
    if not {*FAMILIES[family].keys.values()} <= {flag.field for flag in flags_of("model")}:
        pytest.skip("the extension that implements the layers is not installed")
    theirs, name = model_with(family, sweep.tiny(family)), f"decoder.layers.0.self_attention.{name}.weight"
    whole = HFWeights(weights(theirs), config_from_hf(theirs.config.to_dict()), family)
    assert torch.equal(whole.read(name, box), whole.read(name)[box])


@pytest.mark.parametrize(("base", "change", "message"), TABLES["refused"])
def test_inexpressible_settings_are_refused(base: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({"model_type": "llama", **SIZES, **BASES[base], **change})


@pytest.mark.parametrize(
    ("config", "model_type", "message"),
    [
        (GPT, "llama", "normalization = 'LayerNorm'"),
        (LLAMA, "gpt2", "activation_func = 'swiglu'"),
        (replace(LLAMA, window_size=3), "llama", "window_size = 3"),
        (replace(LLAMA, qk_layernorm=True), "qwen2", "qk_layernorm = True"),
        (replace(LLAMA, rotary_interleaved=True), "llama", "rotary_interleaved = True"),
        (STYLES["bloom"], "gpt2", "position_embedding_type = 'alibi', embed_layernorm = True"),
        (replace(STYLES["bloom"], embed_layernorm=False), "bloom", "embed_layernorm = False"),
        (replace(GPT, squared_relu=True), "gpt2", "activation_func = 'squared_relu'"),
    ],
)
def test_inexpressible_models_are_refused(config: TransformerConfig, model_type: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_to_hf(config, model_type)


def test_every_problem_with_weights_is_named() -> None:
    theirs = random_model("llama2")
    config = config_from_hf(theirs.config.to_dict())
    tensors = weights(theirs)
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 55)
    tensors["model.layers.7.mlp.down_proj.weight"] = torch.zeros(32, 56)
    with pytest.raises(ValueError, match=r"norm.weight is missing") as error:
        from_hf(tensors, config, "llama")
    assert "[32, 55]" in str(error.value) and "layers.7.mlp.down_proj.weight is unknown" in str(error.value)


def test_the_text_model_of_a_multimodal_folder_is_read(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.Llama4Config(vision_config=vision, text_config=CASES["llama4"][1])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    folder, text = HFFolder(tmp_path), model.language_model
    expected = config_from_hf(text.config.to_dict())
    assert config_from_hf(folder.config) == expected
    read, stored = (
        from_hf(folder.tensors, expected, "llama4_text"),
        there_and_back(weights(text), expected, "llama4_text"),
    )
    assert read.keys() == stored.keys() and all(torch.equal(read[name], value) for name, value in stored.items())
    with pytest.raises(ValueError, match="text_config of model_type llama4 must be an object"):
        text_model({"model_type": "llama4"})


def test_the_text_model_of_a_gemma_4_folder_is_read(tmp_path: Path) -> None:
    """The names of tensors in this folder have a different prefix. The text model has a norm and layers whose names
    have no prefix."""
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Gemma4Config(text_config=sweep.tiny("gemma4_text"), vision_config=vision, audio_config=None)
    transformers.Gemma4ForConditionalGeneration(config).save_pretrained(tmp_path)
    folder = HFFolder(tmp_path)
    model = config_from_hf(folder.config)
    read = from_hf(folder.tensors, model, "gemma4_text")
    stored = folder.tensors["layers.1.self_attn.k_proj.weight"][:, :]
    assert torch.equal(read["decoder.layers.1.self_attention.linear_qk.weight"][0, -1], stored)
    # Published files contain unused key projections of layers that share the keys of earlier layers.
    unread = {"layers.4.self_attn.k_proj.weight": stored}
    assert from_hf({**folder.tensors, **unread}, model, "gemma4_text").keys() == read.keys()


def test_mxfp4_weights_are_read() -> None:
    """MXFP4 weights are read with the same values as in transformers, whether they are read as a whole or in parts.
    Blocks and scales that do not match are refused."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    settings = {**CASES["gpt-oss"][1], "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1}
    model = transformers.AutoModelForCausalLM.from_config(transformers.GptOssConfig(**settings))
    config, stored = config_from_hf(model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}), {}
    expected = weights(model)
    for name, value in dict(expected).items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            stored[name] = value
            continue
        experts, within, out = value.shape
        stored[f"{name}_blocks"] = torch.randint(256, (experts, out, within // 32, 16), dtype=torch.uint8)
        stored[f"{name}_scales"] = torch.randint(110, 130, (experts, out, within // 32), dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
    found = from_hf(stored, config, "gpt_oss")
    assert all(torch.equal(value, expected[name]) for name, value in to_hf(found, config, "gpt_oss").items())
    read = HFWeights(stored, config, "gpt_oss").read
    for name, box in (
        ("linear_fc1.weight", (slice(1, 4), slice(1, 2), slice(17, 48), slice(40, 90))),
        ("linear_fc2.weight", (slice(0, 2), slice(3, 70), slice(31, 33))),
        ("linear_fc1.bias", (slice(2, 4), slice(0, 1), slice(17, 48))),
    ):
        whole = found[f"decoder.layers.0.mlp.experts.{name}"]
        assert torch.equal(read(f"decoder.layers.0.mlp.experts.{name}", box), whole[box]), name
    name = "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ValueError, match=r"down_proj: blocks and scales of shapes .* are not MXFP4"):
        from_hf(stored | {f"{name}_scales": stored[f"{name}_scales"][..., :1]}, config, "gpt_oss")


def test_a_tied_head_that_differs_is_refused() -> None:
    theirs = random_model("qwen2")
    config = config_from_hf(theirs.config.to_dict())
    with pytest.raises(ValueError, match="differs from the word embeddings"):
        from_hf({**theirs.state_dict(), "lm_head.weight": torch.zeros(83, 32)}, config, "qwen2")


def test_weights_of_sinkhorn_routing_are_not_those_of_mixtral() -> None:
    """Sinkhorn routing applies the softmax to all experts, but Mixtral applies it to the selected experts."""
    sinkhorn = replace(MIXTRAL, moe_router_load_balancing_type=("sinkhorn",))
    with pytest.raises(ValueError, match="moe_router_pre_softmax = True"):
        config_to_hf(sinkhorn, "mixtral")


def test_an_explicit_yarn_factor_must_match() -> None:
    """The attention factor in a config.json must equal the factor that the other YaRN settings imply, as it does for
    gpt-oss and Qwen."""
    hf = {"model_type": "llama", "rope_scaling": {**YARN, "attention_factor": 1.1386294361119891}, **SIZES}
    assert config_from_hf(hf).rotary_mscale == pytest.approx(1.1386294361119891)


EXAMPLE = Path(__file__).parents[3] / "examples" / "pebble.json"


def test_a_family_from_a_file_converts_both_ways(tmp_path: Path) -> None:
    """With the example family in the documentation, a folder is converted to a checkpoint and back to the same
    folder."""
    add_families([str(EXAMPLE)])
    model = replace(LLAMA, kv_channels=24, rotary_base=100.0, swiglu=False, activation_func="geglu")
    parameters = {p.meta.name: p.detach().float() for p in GPTModel(model, FP64).parameters()}
    written, theirs = config_to_hf(model, "pebble"), to_hf(parameters, model, "pebble")
    assert (written["architectures"], written["channels_of_head"]) == (["PebbleForCausalLM"], 24)
    assert "decoder.blocks.1.attn.qkv.weight" in theirs
    (first := tmp_path / "first").mkdir()
    save_file(theirs, first / "model.safetensors", metadata={"format": "pt"})
    (first / "config.json").write_text(json.dumps(written))
    for source, target in (("first", "ours"), ("ours", "second")):
        folders = ["--input", str(tmp_path / source), "--output", str(tmp_path / target)]
        assert convert_checkpoint.main([*folders, "--hf-family", str(EXAMPLE)]) == 0
    assert_same_weights(first, tmp_path / "second")
    argv = ["--load", str(first), "--hf-family", str(EXAMPLE), "--mock-data", "--tokenizer-type", "NullTokenizer"]
    assert parse_args(argv).model.kv_channels == 24


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keyz": {}}, "keyz: is not a key of a family; nearest: keys"),
        ({"keys": {"hidden": "hiden_size"}}, "keys: 'hiden_size' is not a field of a model; nearest: hidden_size"),
        ({"fixed": {"swigloo": True}}, "fixed: 'swigloo' is not a field of a model; nearest: swiglu"),
        ({"weights": ["ens"]}, "weights: there is no table 'ens'; nearest: ends"),
        ({"weights": [{"x": 3}]}, r"weights\[0\].x: must be text, not 3"),
        ({"only": {"x": 3}}, "only.x: must be a list, not 3"),
        ({"window_groups": "2"}, 'window_groups: must be a whole number, not "2"'),
        ({"multi_token_key": 2}, "multi_token_key: must be text, not 2"),
        (
            {"like": "llama", "keys": {"hiden_size": "hidden_size"}},
            "keys: 'hiden_size' sets hidden_size, which",
        ),
        ({"like": "llama", "values": {"hiden_act": {"silu": "swiglu"}}}, "values: 'hiden_act' is not a key of the"),
        (
            {"like": "llama", "only": {"mlp_bais": [False]}},
            "only: 'mlp_bais' is not a key .*; nearest: mlp_bias",
        ),
        ({"like": "llama", "defaults": {"rope_thetta": 1.0}}, "defaults: 'rope_thetta' .*; nearest: rope_theta"),
        ({"like": "llama", "spelling": {"num_hiden_layers": "n"}}, "spelling: .*; nearest: num_hidden_layers"),
        ({"like": "llama", "equal": {"n": "head_dimm"}}, "equal: 'head_dimm' .*; nearest: head_dim"),
        (
            {"like": "llama", "powers": {"softmax_scale": {"head_dimm": -0.5}}},
            "powers: 'head_dimm' .*: head_dim",
        ),
        ({"like": "llama", "multi_token_key": "num_hidden_layer"}, "multi_token_key: .*; nearest: num_hidden_layers"),
        (
            {"like": "llama", "weights": ["like", {".self_atention.linear_qkv.*": "x"}]},
            r"weights: '.self_atention.linear_qkv.\*' is not a parameter of a model; nearest: .self_attention",
        ),
        ({"like": "lama"}, "like: 'lama' is neither a base nor a family; nearest: llama"),
        ({"like": "any decoder"}, "architecture: is missing"),
        ("[]", r"the file: must be an object, not \[\]"),
        ('{"like": "llama", "like": "qwen2"}', "key 'like' is given twice"),
        ("{", "cannot be read as JSON"),
        (None, "there is no such file"),
    ],
)
def test_problems_of_a_family_file_are_named(tmp_path: Path, change: dict[str, Any] | str | None, message: str) -> None:
    path = tmp_path / "wrong.json"
    if change is not None:
        path.write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: .*{message}"):
        add_families([str(path)])
    (tmp_path / "config.json").write_text("{}")
    argv = ["--load", str(tmp_path), "--hf-family", str(path)]
    with pytest.raises(ValueError, match=rf"--hf-family.*wrong.json: .*{message}"):
        parse_args(argv)


def test_no_name_of_a_built_in_family_is_misspelled() -> None:
    found = {name: list(misspelled_names(family_files._built_in(name))) for name in family_files.built_in_names()}
    assert {name: problems for name, problems in found.items() if problems} == {}
    assert list(misspelled_names(json.loads(EXAMPLE.read_text()))) == []


def test_a_family_file_with_an_unknown_layout_or_the_name_of_another(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(
        json.dumps({"like": "llama", "architecture": "O", "weights": ["like", {".mlp.linear_fc2.weight": "No: .x"}]})
    )
    add_families([str(tmp_path / "odd.json")])
    with pytest.raises(
        ValueError, match=r"odd.json: weights: decoder.layers.\{i\}.mlp.linear_fc2.weight: unknown layout 'No'"
    ):
        placements(LLAMA, "odd")
    (tmp_path / "llama.json").write_text(json.dumps({"like": "llama"}))
    with pytest.raises(ValueError, match=r"llama.json: model_type 'llama' is already defined by families/llama.json"):
        add_families([str(tmp_path / "llama.json")])


def test_built_in_families_are_small_and_have_known_layouts() -> None:
    for name in family_files.built_in_names():
        assert len(family_files.FOLDER.joinpath(f"{name}.json").read_text().splitlines()) <= 60, name
        family = FAMILIES[name]
        assert {rule.layout for rule in (*family.rules, *family.multi_token)} <= LAYOUTS.keys(), name
        assert f"`{name}`" in Path(__file__).parents[3].joinpath("docs", "conversion.md").read_text(), name
