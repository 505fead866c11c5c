"""Test that logits and gradients equal those of `transformers` for random tiny models of each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch
from megatron.extensions.interop.hugging_face import family_files
from megatron.extensions.interop.hugging_face.families import FAMILIES
from megatron.extensions.interop.hugging_face.read_config import config_from_hf
from megatron.extensions.interop.hugging_face.weights import HFWeights
from megatron.extensions.interop.hugging_face.write_config import config_to_hf
from megatron.training.config.flags import flags_of
from tests.extensions.hugging_face import sweep
from tests.extensions.hugging_face.hf_exact import exact, model_with, random_model, weights
from tests.extensions.hugging_face.hf_models import CASES, MIXTURE, TABLES
from tests.extensions.hugging_face.whole_models import gradients_of, model_of, there_and_back, to_hf

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("fp64")


@pytest.mark.parametrize("case", CASES)
def test_logits_gradients_weights_and_settings_match_transformers(case: str) -> None:
    """The logits and the gradients of all weights equal those of transformers. A round trip changes no byte of the
    weights and no setting."""
    model_type, settings = CASES[case]
    assert sweep.verdict(model_type, settings) == (sweep.BOTH, "")
    stated = transformers.AutoConfig.for_model(model_type, **settings).to_dict()
    written = config_to_hf(config_from_hf(stated), model_type)
    meant = transformers.AutoConfig.for_model(**written).to_dict()
    others = {"bos_token_id", "eos_token_id", "head_dim", "n_inner", "architectures", "dtype"}
    keys = {*written, "rope_parameters", "layer_types"} & stated.keys() - others
    assert {key: meant[key] for key in keys} == {key: stated[key] for key in keys}


FIELDS = {flag.field for flag in flags_of("model")}


INSTALLED = [
    each
    for each in sorted(sweep.KNOWN.keys() & {*family_files.built_in_names()})
    if {*FAMILIES[each].keys.values(), *FAMILIES[each].fixed} <= FIELDS
]
"""Families whose layers are provided by installed extensions."""

ALONE = sorted({*INSTALLED} - {model_type for model_type, *_ in TABLES["cases"].values()})
"""Families for which the table of cases contains no case. Only families whose layers are provided by installed
extensions are included."""


@pytest.mark.parametrize("family", ALONE)
def test_families_without_a_case_match_transformers(family: str) -> None:
    """For each family, the tiny model of `sweep.py` is compared with transformers, including the gradients."""
    assert sweep.verdict(family, sweep.tiny(family)) == (sweep.BOTH, "")


CACHED = (
    "kimi_linear",
    "minimax",
    "mamba2",
    "mamba",
    "falcon_mamba",
    "jamba",
    "falcon_h1",
    "recurrent_gemma",
    "lfm2",
    "gemma4_text",
    "glm_moe_dsa",
    "deepseek_v32",
    "deepseek_v4",
    "olmo_hybrid",
    "qwen3_next",
    "qwen3_5_text",
    "nemotron_h",
    "bamba",
    "granitemoehybrid",
)


WITHOUT_CACHE = ("qwen3_5_text", "qwen3_next", "nemotron_h")
"""Families for which transformers fails or generates a different text if a KV cache is used."""


@pytest.mark.parametrize("family", [each for each in CACHED if each in INSTALLED])
def test_greedy_text_with_a_cache_matches_transformers(family: str) -> None:
    """The text that is generated token by token with a KV cache equals the text that transformers generates."""
    kv_cache = pytest.importorskip(
        "megatron.extensions.use.inference.generation.kv_cache", reason="inference is deleted"
    )
    theirs, new = model_with(family, sweep.tiny(family)), torch.randint(1, 83, (2, 5))  # 0 pads texts
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = theirs.generate(new, **greedy, use_cache=family not in WITHOUT_CACHE)
    config = config_from_hf(theirs.config.to_dict())
    model, cache, text = (
        model_of(there_and_back(weights(theirs), config, family), config),
        kv_cache.KeyValueCache(),
        new,
    )
    for _ in range(8):
        logits = model.logits(None, Batch.of_tokens(new), cache.extend([new.shape[1]] * len(new), new.device))
        new = logits[:, -1:].argmax(-1)
        text = torch.cat((text, new), 1)
    assert text.tolist() == expected.tolist()


def ling(theirs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert a GLM model to a Ling 2.0 model, whose layers are the same but have different names. transformers has no
    class for Ling 2.0."""
    keys = {
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "attention_bias": "use_qkv_bias",
    }
    names = {
        "model.embed_tokens": "model.word_embeddings",
        ".self_attn.o_proj": ".attention.dense",
        ".self_attn.q_norm": ".attention.query_layernorm",
        ".self_attn.k_norm": ".attention.key_layernorm",
        ".gate.e_score_correction_bias": ".gate.expert_bias",
    }
    settings = {keys.get(key, key): value for key, value in theirs.config.to_dict().items()}
    tensors, found = weights(theirs), {}
    for name, value in tensors.items():
        if ".self_attn.q_proj" in name:
            joined = torch.cat([tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"])
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = joined
        elif ".self_attn.k_proj" not in name and ".self_attn.v_proj" not in name:
            old = next((old for old in names if old in name), "")
            found[name.replace(old, names[old]) if old else name] = value
    return settings | {"model_type": "bailing_moe", "score_function": "sigmoid"}, found


def test_ling_matches_the_layers_of_glm() -> None:
    theirs, tokens = random_model("glm4-moe"), torch.randint(83, (2, 24))
    settings, stored = ling(theirs)
    config = config_from_hf(settings)
    assert config_from_hf(config_to_hf(config, "bailing_moe")) == config
    read = there_and_back(stored, config, "bailing_moe")
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = model_of(read, config).logits(None, Batch.of_tokens(tokens))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    weights_of = HFWeights(stored, config, "bailing_moe")
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    box = (slice(1, 2), slice(1, 4), slice(3, 9), slice(8, 24))
    assert torch.equal(weights_of.read(name, box), read[name][box])


STEP = {
    **MIXTURE,
    "num_experts": None,
    "n_routed_experts": 8,
    "share_expert_dim": 20,
    "num_sliding_attention_heads": 6,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
    "rope_theta": [100.0, 500.0, 100.0, 100.0],
    "partial_rotary_factors": [1.0, 0.5, 1.0, 1.0],
    "moe_router_scaling_factor": 3.0,
    "query_pre_attn_scalar": 24,
}


class StepForCausalLM(torch.nn.Module):
    """Text model of Step-3.5-Flash with an output layer, because transformers has only a text-and-image model."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.models.step3p7.modeling_step3p7 import Step3p7TextConfig, Step3p7TextModel

        torch.manual_seed(3)
        self.config = Step3p7TextConfig(**STEP)
        self.model = Step3p7TextModel(self.config)
        self.lm_head = torch.nn.Linear(32, 83, bias=False)
        self.double().eval()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.model(tokens, use_cache=False).last_hidden_state)

    def published(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename `tensors` from parameter and buffer names to the names in published files."""
        names = {".mlp.experts.": ".moe.", ".mlp.shared_experts.": ".share_expert.", ".mlp.gate.w": ".moe.gate.w"}
        found = {}
        for name, value in tensors.items():
            if name.endswith("gate_up_proj"):
                base = name.replace(".mlp.experts.gate_up_proj", ".moe.")
                halves = zip(("gate", "up"), value.chunk(2, dim=1), strict=True)
                found |= {f"{base}{part}_proj.weight": half.contiguous() for part, half in halves}
                continue
            name = name.replace(".mlp.gate.e_score_correction_bias", ".moe.router_bias")
            name = name + ".weight" if name.endswith("experts.down_proj") else name
            old = next((old for old in names if old in name), "")
            found[name.replace(old, names[old]) if old else name] = value
        return found


def test_step_matches_the_text_layers_of_its_class() -> None:
    """The test compares logits and the gradients of all weights. The test also checks that a round trip preserves all
    weights and settings."""
    theirs, tokens = exact(StepForCausalLM()), torch.randint(83, (2, 24))
    stored, settings = theirs.published(theirs.state_dict()), theirs.config.to_dict()
    config = config_from_hf(settings)
    assert (config.window_num_attention_heads, config.window_rotary_percent) == (6, 1.0)
    written = config_to_hf(config, "step3p5")
    assert config_from_hf(written) == replace(config, kv_channels=16)
    assert all(settings[key] == written[key] for key in written.keys() & settings.keys() - {"architectures"})
    read = there_and_back(stored, config, "step3p5")
    mine = model_of(read, config)
    logits = theirs(tokens)
    torch.testing.assert_close(mine.logits(None, Batch.of_tokens(tokens)), logits.detach(), rtol=1e-10, atol=1e-10)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    batch = Batch.of_tokens(tokens)
    gradients = theirs.published({name: p.grad for name, p in theirs.named_parameters()})
    found = read | gradients_of(mine, batch, batch.num_tokens)
    for name, gradient in gradients.items():
        assert (to_hf(found, config, "step3p5")[name] - gradient).norm() < 1e-9 * gradient.norm().clamp(min=1e-9), name
    weights_of = HFWeights(stored, config, "step3p5")
    for name, box in {
        "decoder.layers.2.self_attention.linear_qkv.weight": (slice(1, 2), slice(3, 70), slice(8, 24)),
        "decoder.layers.2.mlp.experts.linear_fc1.weight": (slice(2, 5), slice(0, 2), slice(3, 9), slice(8, 24)),
    }.items():
        assert torch.equal(weights_of.read(name, box), read[name][box])
