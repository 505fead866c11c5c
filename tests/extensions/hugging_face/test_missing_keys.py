"""Test that a config.json that lacks keys is read as transformers reads it, with the same defaults and the same rules
for derived keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.read_config import WRITTEN, config_from_hf, family_of, unread_keys
from megatron.training.config.flags import flags_of
from tests.extensions.hugging_face import class_defaults, missing_keys, sweep
from tests.extensions.hugging_face.hf_models import SIZES

FIELDS = {flag.field for flag in flags_of("model")}
FAMILIES = [
    name
    for name in FAMILIES
    if name in sweep.KNOWN and {*FAMILIES[name].keys.values(), *FAMILIES[name].fixed} <= FIELDS
]
"""Families that have a class in transformers and whose layers are provided by installed extensions."""


def test_table_of_defaults_matches_the_installed_transformers() -> None:
    stated = json.loads(class_defaults.TABLE.read_text())
    if stated["transformers"] != class_defaults.transformers.__version__:
        pytest.skip(f"the table is that of transformers {stated['transformers']}")
    assert stated == json.loads(json.dumps(class_defaults.installed()))


def test_files_with_only_sizes_are_read() -> None:
    """Each config.json states only the sizes of the family's tiny model and lacks all other keys."""
    found = {}
    for name in FAMILIES:
        left = {"model_type": name, **sweep.tiny(name)}
        if text := missing_keys.difference(name, left, logits=False):
            found[name] = text
    assert not found


@pytest.mark.usefixtures("fp64")
@pytest.mark.parametrize(
    ("model_type", "changes", "deleted"),
    [
        ("qwen2", {"use_sliding_window": True}, ["layer_types", "max_window_layers"]),
        ("qwen2_moe", {"use_sliding_window": True}, ["layer_types", "max_window_layers"]),
        ("smollm3", {"use_sliding_window": True, "no_rope_layer_interval": 2}, ["layer_types", "no_rope_layers"]),
        ("flint", {}, ["layer_types", "mlp_only_layers"]),
        ("olmo_hybrid", {}, ["layer_types", "linear_num_value_heads", "linear_key_head_dim"]),
        ("deepseek_v32", {"first_k_dense_replace": 3}, ["mlp_layer_types"]),
        ("cohere2", {}, ["head_dim", "layer_types"]),
    ],
)
def test_values_implied_by_other_keys_may_be_missing(
    model_type: str, changes: dict[str, Any], deleted: list[str]
) -> None:
    """A config.json from which the keys in `deleted` are removed is read as transformers reads it. For one family,
    logits and gradients are compared too."""
    if model_type not in FAMILIES:
        pytest.skip("the extension with its layers is not installed")
    left = {key: value for key, value in missing_keys.tiny(model_type, changes).items() if key not in deleted}
    assert missing_keys.difference(model_type, left, logits=model_type == "qwen2") == ""


SOME = ("llama", "qwen2", "kimi_linear", "mpt", "gpt2", "deepseek_v3", "falcon_h1", "cohere2", "gemma3_text", "mixtral")
"""Sample of families whose config.json files are read by different code. With --whole, all families are tested."""


@pytest.mark.usefixtures("fp64")
@pytest.mark.grid("family", [family for family in SOME if family in FAMILIES], FAMILIES)
def test_each_key_of_a_family_may_be_missing(family: str) -> None:
    stated = missing_keys.tiny(family)
    differences = {
        key: missing_keys.difference(family, left, stated) for key, left in missing_keys.deletions(family, stated)
    }
    assert {key: text for key, text in differences.items() if text} == {}


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
@pytest.mark.parametrize("model_type", ["llama", "phi3", "ministral3"])
def test_scaling_without_the_original_length_is_read(model_type: str, kind: str) -> None:
    """If a config.json lacks the original context length, the default of the class is used, or else the longest
    context."""
    numbers = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "llama_4_scaling_beta": 0.1}
    left = {"model_type": model_type, **SIZES, "rope_scaling": {"rope_type": kind, **numbers}}
    assert missing_keys.difference(model_type, left, logits=False) == ""


OLDER: dict[str, list[dict[str, Any]]] = {
    "axk1": [{"first_k_dense_replace": 2}, {"moe_layer_freq": 2, "first_k_dense_replace": 0}],
    "bloom": [{"n_embed": 48, "hidden_size": None}, {"num_hidden_layers": 2}],
    "cohere2": [{"sliding_window_pattern": 2}],
    "deepseek_v4": [
        {"compress_rate_hca": 8},
        {"compress_ratios": [0, 4, 128]},
        {"num_hash_layers": 2},
        {"qk_rope_head_dim": 8},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ],
    "falcon": [{"n_embed": 48}],
    "gemma3_text": [
        {"sliding_window_pattern": 2},
        {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    "glm_moe_dsa": [{"index_topk_freq": 2}, {"index_topk_freq": 2, "index_skip_topk_offset": 1}, {"num_experts": 16}],
    "gpt2": [{"n_inner": 40}, {"hidden_size": 48}, {"max_position_embeddings": 40, "n_positions": 50}],
    "gpt_neox": [{"rotary_pct": 0.5, "rotary_emb_base": 500}, {"rope_scaling": {"type": "linear", "factor": 2.0}}],
    "lfm2": [{"tie_embedding": False}, {"block_ff_dim": 40}],
    "minimax_m2": [{"rotary_dim": 8}],
    "mixtral": [{"num_experts": 4, "num_local_experts": 6}],
    "nemotron_h": [
        {"mamba_n_groups": 4, "n_groups": 2},
        {"mamba_d_conv": 3, "mamba_chunk_size": 9},
        {"hybrid_override_pattern": "M-M*-"},
    ],
    "olmo3": [{"rope_theta": 500000.0}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}],
    "phi3": [{"rope_theta": 300.0, "partial_rotary_factor": 0.5}],
    "qwen3_5_text": [{"full_attention_interval": 2}],
    "qwen3_5_moe_text": [{"full_attention_interval": 3}],
    "qwen3_next": [{"full_attention_interval": 2}],
}
"""Settings in which some config.json keys have an older or alternative name that transformers still reads."""


@pytest.mark.parametrize("model_type", [each for each in OLDER if each in FAMILIES])
def test_older_keys_and_other_names_are_read(model_type: str) -> None:
    """The test uses the keys of older files and removes the keys that replace them in newer files."""
    for changes in OLDER[model_type]:
        newer = {"layer_types", "mlp_layer_types", "rope_parameters", "indexer_types", "layers_block_type"}
        newer |= {"compress_rates"} if "compress_rate_hca" in changes else set()
        left = {key: value for key, value in sweep.tiny(model_type).items() if key not in newer}
        left = {key: value for key, value in (left | changes).items() if value is not None}
        meant = missing_keys.difference(model_type, {"model_type": model_type, **left}, logits=False)
        assert meant == "", changes
        unread = [key for notice in unread_keys({"model_type": model_type, **left}) for key in notice.split()]
        assert "num_experts" in changes or not unread, changes


def test_every_key_that_classes_write_is_known() -> None:
    """The test covers the default config.json and the tiny model's config.json of each family. No key in these files is
    reported as ignored. If the value of a key that the transformers class computes from other keys is changed, the key
    must be reported, unless the family uses it."""
    found = {}
    for name in FAMILIES:
        for settings in ({}, sweep.tiny(name)):
            stated = missing_keys.whole(name, settings)
            if notices := [each for each in unread_keys(stated) if not {*each.split(": ")[1].split()} & {*settings}]:
                found[name] = notices
            other = {key: "other" for key in stated if key in WRITTEN}
            unread = {*"".join(unread_keys({**stated, **other})).replace(",", "").replace(":", "").split()}
            known = family_of(stated)
            if missing := other.keys() - unread - {*known.class_defaults, *known.keys, *known.defaults}:
                found[name] = sorted(missing)
    assert not found


def test_keys_that_change_some_layers_are_refused() -> None:
    overrides = {"0": {"intermediate_size": 8}}
    with pytest.raises(ValueError, match=r"per_layer_config = .*: 8}}, which changes settings of individual layers"):
        config_from_hf({"model_type": "llama", **SIZES, "per_layer_config": overrides})
    stated = missing_keys.tiny("gpt_neo")
    config_from_hf(stated)
    with pytest.raises(ValueError, match="attention_layers differs from attention_types"):
        config_from_hf(stated | {"attention_layers": ["global"] * len(stated["attention_layers"])})
    with pytest.raises(ValueError, match="attention_types"):
        config_from_hf(stated | {"attention_types": [[[], 1 << 60], [["global"], 1 << 60]]})


def test_scaling_without_a_number_is_refused_with_a_clear_message() -> None:
    for kind, needed in (("llama3", "factor and low_freq_factor and high_freq_factor"), ("linear", "factor")):
        with pytest.raises(ValueError, match=f"rotary scaling of type '{kind}' lacks {needed}$"):
            config_from_hf({"model_type": "llama", **SIZES, "rope_scaling": {"rope_type": kind}})
