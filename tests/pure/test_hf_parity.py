"""Logits equal those of `transformers` for random tiny models of each family; weights and settings go both ways."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hf.folder import HFFolder
from megatron.core.models.hf.read_config import config_from_hf, text_model
from megatron.core.models.hf.weights import HFWeights, copy_shards_, from_hf, to_hf
from megatron.core.models.hf.write_config import config_to_hf
from megatron.core.parallel_state import ParallelState
from megatron.planner.parameters import count_parameters
from tests.gpt_cases import FP64, GPT, LLAMA, STYLES, logits_in_parts
from tests.hf_models import CASES, GPT2_SIZES, MIXTURE, SIZES, YARN, weights_in
from tests.moe_cases import MIXTRAL

transformers = pytest.importorskip("transformers")

EXACT = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
EAGER = {"attn_implementation": "eager"}
OPTIONS = {"bloom": EAGER, "gemma2": EAGER, "gpt_oss": EXACT | EAGER, "mimo_v2_flash": EXACT | EAGER}


ONE_PLUS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm", "Step3p7RMSNorm")
"""Norms whose weights are added to 1."""


class ExactFunctions:
    """torch.nn.functional with a softmax in the dtype of its operand."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return x.softmax(dim)


class ExactModules:
    """torch.nn with such functions."""

    functional = ExactFunctions()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn, name)


class ExactTorch:
    """torch with fp64 where the gated delta rule of `transformers` asks for fp32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def random_model(case: str) -> Any:
    """A model of `transformers` in fp64 in which no weight, norm or bias is left at a special value.

    Its RMSNorm, eager softmax and router are fp32 whatever the model's dtype; here all are as precise as the rest. So
    is BLOOM's GeLU, whose constants have eight digits.
    """
    model_type, settings = CASES[case]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    options = OPTIONS.get(model_type, EXACT)
    return exact(transformers.AutoModelForCausalLM.from_config(config, **options).double().eval())


def exact(model: Any) -> Any:
    """A model in fp64 with such weights, all of whose parts are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    for module in model.modules():
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(float(module.scalar_embed_scale), dtype=torch.float64)
        if type(module).__name__ in ONE_PLUS:
            module.forward = partial(rms_norm, 1 + module.weight, module.eps)
        elif type(module).__name__ == "Llama4TextL2Norm":
            module.forward = partial(rms_norm, 1, module.eps)
        elif type(module).__name__ == "Llama4TextRMSNorm":
            module.forward = partial(rms_norm, module.weight, module.eps)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module.weight, module.variance_epsilon)
        if type(module).__name__ == "Qwen3NextGatedDeltaNet":
            sys.modules[type(module).__module__].torch = ExactTorch()
        if type(module).__name__ == "Qwen3NextRMSNormGated":
            module.forward = partial(gated_rms_norm, module.weight, module.variance_epsilon)
        if type(module).__name__ == "Step3p7TopKRouter":
            bias = module.e_score_correction_bias
            module.forward = partial(route_by_bias, module.weight, module.top_k, 1.0, bias=bias)
        elif type(module).__name__ == "MiniMaxM2TopKRouter":
            module.forward = partial(route_by_bias, module.weight, module.top_k, 1.0)
        elif type(module).__name__ == "AfmoeTokenChoiceRouter":
            module.forward = partial(route_by_bias, module.gate.weight, module.top_k, module.route_scale)
        elif type(module).__name__.endswith("TopKRouter") and model.config.model_type != "gpt_oss":
            module.forward = partial(route, module.weight, module.top_k, getattr(module, "norm_topk_prob", True))
        for name in ("e_score_correction_bias", "expert_bias"):
            if (bias := getattr(module, name, None)) is not None:
                bias.copy_(torch.randn(len(bias)).float() * 0.1)
        if type(module).__name__ == "DeepseekV2TopkRouter":
            module.forward = partial(route, module.weight, module.top_k, False)
        elif type(module).__name__.endswith("TopkRouter"):
            module.forward = partial(route_in_groups, module)
        if type(module).__name__ == "Gemma2Attention":
            sys.modules[type(module).__module__].nn = ExactModules()
        if type(module).__name__ == "XIELUActivation":
            module.eps.fill_(-1e-6)
        if type(module).__name__ == "BloomGelu":
            module.forward = partial(F.gelu, approximate="tanh")
            sys.modules[type(module).__module__].F = ExactFunctions()
    return model


def route(weight: Tensor, k: int, normalized: bool, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ weight.T
    weights, experts = logits.softmax(-1).topk(k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True) if normalized else weights, experts


def route_by_bias(weight: Tensor, k: int, scale: float, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ weight.T
    experts = (logits.sigmoid() + bias).topk(k, dim=-1).indices
    weights = logits.sigmoid().gather(1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) * scale, experts


def route_in_groups(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ router.weight.T
    scores = logits.sigmoid()
    ranked = (scores + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))
    groups = ranked.topk(2, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1).indices
    chosen = torch.full_like(ranked, -torch.inf).scatter(1, groups[..., None].expand(-1, -1, ranked.shape[-1]), 0.0)
    experts = (ranked + chosen).flatten(1).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, experts


def rms_norm(weight: Tensor | float, eps: float, x: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gated_rms_norm(weight: Tensor, eps: float, x: Tensor, gate: Tensor) -> Tensor:
    return rms_norm(weight, eps, x) * F.silu(gate)


def weights(model: Any) -> dict[str, Tensor]:
    """The tensors that a file of the model holds: without a tied head, and expert by expert."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return weights_in(Path(folder))


def ours(model: Any) -> GPTModel:
    hf_config = model.config.to_dict()
    config = config_from_hf(hf_config)
    mine = GPTModel(config, FP64, initialize=False).eval()
    copy_shards_(mine.parameters(), from_hf(weights(model), config, hf_config["model_type"]), ParallelState().coords)
    return mine


FP32_PARTS = ("deepseek_v2", "qwen3_next", "llama4_text")
"""Families of which `transformers` computes positions, weights of experts or the decay of delta nets in fp32 at any
dtype."""


@pytest.mark.parametrize("case", CASES)
def test_logits(case: str) -> None:
    theirs = random_model(case)
    tokens = torch.randint(83, (2, 24))
    with torch.no_grad():
        expected = theirs(tokens).logits
    found = ours(theirs).logits(None, Batch.of_tokens(tokens))
    tolerance = 1e-5 if CASES[case][0] in FP32_PARTS else 1e-10
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", ["gpt-oss", "llama4"])
def test_cached_keys_change_no_logits(case: str) -> None:
    """Of models whose layers differ in windows or chunks, sinks, positions and experts."""
    model, tokens = ours(random_model(case)), torch.randint(83, (2, 24))
    parts = logits_in_parts(model, tokens, (9, 1, 3, 11))
    expected = model.logits(None, Batch.of_tokens(tokens))
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-10, atol=1e-10)


GRADIENTS = (
    *("deepseek-v3", "deepseek-v3-yarn", "llama-yarn", "glm4-moe", "minimax-m2", "exaone-moe", "afmoe"),
    *("qwen3-next", "apertus", "gemma2", "gpt-oss", "llama4", "mimo-v2-flash"),
)


def ling(theirs: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A model of GLM as one of Ling 2.0, of which transformers has no class: the same layers under other names."""
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


def test_ling_has_the_layers_of_glm() -> None:
    theirs, tokens = random_model("glm4-moe"), torch.randint(83, (2, 24))
    settings, stored = ling(theirs)
    config = config_from_hf(settings)
    assert config_from_hf(config_to_hf(config, "bailing_moe")) == config
    mine = GPTModel(config, FP64, initialize=False).eval()
    read = from_hf(stored, config, "bailing_moe")
    copy_shards_(mine.parameters(), read, ParallelState().coords)
    with torch.no_grad():
        expected = theirs(tokens).logits
    torch.testing.assert_close(mine.logits(None, Batch.of_tokens(tokens)), expected, rtol=1e-10, atol=1e-10)
    back = to_hf(read, config, "bailing_moe")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], value) and back[name].is_contiguous() for name, value in stored.items())
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
    """The text model of Step-3.5-Flash with a head: transformers has one of text and images only."""

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
        """`tensors`, of the names of parameters and buffers, under the names of published files."""
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


def test_step_has_the_text_layers_of_its_class() -> None:
    """Logits, gradients of all weights, and weights and settings there and back."""
    theirs, tokens = exact(StepForCausalLM()), torch.randint(83, (2, 24))
    stored, settings = theirs.published(theirs.state_dict()), theirs.config.to_dict()
    config = config_from_hf(settings)
    assert (config.window_num_attention_heads, config.window_rotary_percent) == (6, 1.0)
    written = config_to_hf(config, "step3p5")
    assert config_from_hf(written) == replace(config, kv_channels=16)
    assert all(settings[key] == written[key] for key in written.keys() & settings.keys() - {"architectures"})
    mine = GPTModel(config, FP64, initialize=False).eval()
    read = from_hf(stored, config, "step3p5")
    copy_shards_(mine.parameters(), read, ParallelState().coords)
    logits = theirs(tokens)
    torch.testing.assert_close(mine.logits(None, Batch.of_tokens(tokens)), logits.detach(), rtol=1e-10, atol=1e-10)
    back = to_hf(read, config, "step3p5")
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], value) and back[name].is_contiguous() for name, value in stored.items())
    F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    batch = Batch.of_tokens(tokens)
    (mine(None, batch) / batch.num_tokens).backward()
    gradients = theirs.published({name: p.grad for name, p in theirs.named_parameters()})
    found = {p.meta.name: torch.zeros_like(p) if p.grad is None else p.grad for p in mine.parameters()}
    found |= {name: value for name, value in read.items() if name not in found}
    for name, gradient in gradients.items():
        assert (to_hf(found, config, "step3p5")[name] - gradient).norm() < 1e-9 * gradient.norm().clamp(min=1e-9), name
    weights_of, name = HFWeights(stored, config, "step3p5"), "decoder.layers.2.self_attention.linear_qkv.weight"
    for name, box in {
        "decoder.layers.2.self_attention.linear_qkv.weight": (slice(1, 2), slice(3, 70), slice(8, 24)),
        "decoder.layers.2.mlp.experts.linear_fc1.weight": (slice(2, 5), slice(0, 2), slice(3, 9), slice(8, 24)),
    }.items():
        assert torch.equal(weights_of.read(name, box), read[name][box])


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case: str) -> None:
    """The loss's gradients of all weights, in their names and layouts."""
    theirs, tokens = random_model(case), torch.randint(83, (2, 24))
    logits = theirs(tokens, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    mine = ours(theirs)
    batch = Batch.of_tokens(tokens)
    (mine(None, batch) / batch.num_tokens).backward()
    found = {p.meta.name: torch.zeros_like(p) if p.grad is None else p.grad for p in mine.parameters()}
    assert all((p.grad is not None) == p.requires_grad for p in mine.parameters())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad if parameter.requires_grad else torch.zeros_like(parameter))
        for name, buffer in theirs.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.zero_()
    back, expected = to_hf(found, mine.config, CASES[case][0]), weights(theirs)
    assert back.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (back[name].double() - gradient).norm() / gradient.norm().clamp(min=1e-9)
        assert error < (1e-4 if CASES[case][0] in FP32_PARTS else 1e-9), name


@pytest.mark.parametrize("case", CASES)
def test_weights_there_and_back_are_byte_equal(case: str) -> None:
    theirs = random_model(case)
    config, model_type = config_from_hf(theirs.config.to_dict()), CASES[case][0]
    stored = {name: value.to(torch.bfloat16) for name, value in weights(theirs).items()}
    back = to_hf(from_hf(stored, config, model_type), config, model_type)
    assert back.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(back[name], value) and back[name].is_contiguous(), name


@pytest.mark.parametrize("case", CASES)
def test_settings_there_and_back(case: str) -> None:
    model_type = CASES[case][0]
    original = random_model(case).config
    config = config_from_hf(original.to_dict())
    written = config_to_hf(config, model_type)
    assert config_from_hf(written) == replace(
        config, **{name: getattr(config_from_hf(written), name) for name in ("kv_channels", "ffn_hidden_size")}
    )
    read = transformers.AutoConfig.for_model(**{k: v for k, v in written.items() if k != "architectures"}).to_dict()
    ignored = {"bos_token_id", "eos_token_id", "head_dim", "n_inner", "architectures"}
    for key, value in original.to_dict().items():
        if key not in ignored and (key in written or key in ("rope_parameters", "layer_types")):
            assert read[key] == value, key


def test_published_files_that_leave_keys_out() -> None:
    llama2 = config_from_hf(
        {
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "rms_norm_eps": 1e-5,
            "vocab_size": 32000,
        }
    )
    assert (llama2.query_groups, llama2.head_dim, llama2.rotary_base) == (32, 128, 10000.0)
    assert not llama2.tied_embeddings and not llama2.group_query_attention


def test_published_files_of_exaone4_without_windows() -> None:
    """All layers then have a rotary embedding."""
    full = {**SIZES, "sliding_window": None, "layer_types": ["full_attention"] * 3}
    config = config_from_hf({"model_type": "exaone4", **full, "sliding_window_pattern": "LLLG"})
    assert config.rope_pattern == (True, True, True) and config.window_size is None
    written = config_to_hf(config, "exaone4")
    assert (written["sliding_window"], written["layer_types"]) == (None, full["layer_types"])


def test_published_files_of_bloom() -> None:
    """Other spellings of sizes; what was set for its training is of no meaning."""
    bloom = config_from_hf(
        {
            "model_type": "bloom",
            "attention_softmax_in_fp32": True,
            "masked_softmax_fusion": True,
            "n_embed": 14336,
            "n_inner": None,
            "n_layer": 70,
            "num_attention_heads": 112,
            "offset_alibi": 100,
            "pretraining_tp": 4,
            "seq_length": 2048,
            "slow_but_exact": False,
            "vocab_size": 250880,
        }
    )
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
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (
            {"model_type": "gpt2", **GPT2_SIZES, "activation_function": "relu"},
            "activation_function = 'relu', supported",
        ),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"model_type": "falcon"}, "'falcon' is not supported: it needs"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "weights quantized by fp8 are not supported"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 4, "quantization_config": {"quant_method": "fp8"}},
            "by fp8 are not supported; mxfp4 is",
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": 1.0}},
            "attention_factor = 1.0 is not supported; it must be 1.13",
        ),
        ({"model_type": "minimax_m2", "num_local_experts": 4, "scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ({"model_type": "bailing_moe", **MIXTURE}, "score_function = 'softmax', supported: 'sigmoid'"),
        ({"model_type": "afmoe", **MIXTURE, "sliding_window": None}, "sliding_window = None is not supported"),
        ({"model_type": "exaone_moe", **MIXTURE, "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 4"),
        ({"model_type": "starcoder2", "embedding_dropout": 0.5}, "embedding_dropout = 0.5 differs"),
        ({"model_type": "own"}, "'own' is not supported; known are gpt2, bloom, llama"),
    ],
)
def test_settings_that_cannot_be_expressed(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({"model_type": "llama", **SIZES, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 2 entries for 3 layers"),
        ({"layer_types": ["full_attention", "linear_attention", "sliding_attention"]}, "'linear_attention'"),
    ],
)
def test_kinds_of_layers_that_cannot_be_expressed(change: dict[str, Any], message: str) -> None:
    settings = {**SIZES, "use_sliding_window": True, "sliding_window": 7, **change}
    with pytest.raises(ValueError, match=message):
        config_from_hf({"model_type": "qwen2", **settings})


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
def test_models_that_a_family_cannot_express(config: TransformerConfig, model_type: str, message: str) -> None:
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


def test_text_model_of_a_multimodal_folder(tmp_path: Path) -> None:
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.Llama4Config(vision_config=vision, text_config=CASES["llama4"][1])
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    folder, text = HFFolder(tmp_path), model.language_model
    expected = config_from_hf(text.config.to_dict())
    assert config_from_hf(folder.config) == expected
    stored = weights(text)
    found = to_hf(from_hf(folder.tensors, expected, "llama4_text"), expected, "llama4_text")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], value) for name, value in stored.items())
    with pytest.raises(ValueError, match="text_config of a llama4 model must be an object"):
        text_model({"model_type": "llama4"})


def test_weights_in_mxfp4() -> None:
    """Read as transformers reads them, whole and in part; refused if both parts do not fit together."""
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


def test_tied_head_that_differs_is_refused() -> None:
    theirs = random_model("qwen2")
    config = config_from_hf(theirs.config.to_dict())
    with pytest.raises(ValueError, match="differs from the word embeddings"):
        from_hf({**theirs.state_dict(), "lm_head.weight": torch.zeros(83, 32)}, config, "qwen2")


def test_weights_of_sinkhorn_routing_are_not_those_of_mixtral() -> None:
    """A softmax over all experts in place of one over those chosen."""
    sinkhorn = replace(MIXTRAL, moe_router_load_balancing_type="sinkhorn")
    with pytest.raises(ValueError, match="moe_router_pre_softmax = True"):
        config_to_hf(sinkhorn, "mixtral")
