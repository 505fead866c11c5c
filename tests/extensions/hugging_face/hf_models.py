"""Tiny random models of each Hugging Face family, made by transformers without a download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.extensions import installed

SIZES = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5}
DEEPSEEK = SIZES | {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
MIXTURE = SIZES | {
    "head_dim": 16,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}
LLAMA4 = SIZES | {
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 56,
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "attention_chunk_size": 7,
    "no_rope_layer_interval": 2,
    "floor_scale": 4,
    "pad_token_id": None,
}
NEOX = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"} | {"use_parallel_residual": False}
GPT2_SIZES = {"vocab_size": 83, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {**GPT2_SIZES, "bos_token_id": 1, "eos_token_id": 2}),
    "gpt2-exact-gelu": ("gpt2", {**GPT2_SIZES, "activation_function": "gelu"}),
    "gpt2-untied": ("gpt2", {**GPT2_SIZES, "n_inner": 40, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "bloom": ("bloom", {"vocab_size": 83, "hidden_size": 48, "n_layer": 3, "n_head": 6, "seq_length": 64}),
    "bloom-untied": (
        "bloom",
        {"vocab_size": 83, "hidden_size": 32, "n_layer": 2, "n_head": 4, "tie_word_embeddings": False},
    ),
    "llama2": ("llama", {**SIZES, "num_key_value_heads": 4}),
    "llama3": ("llama", {**SIZES, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}),
    "llama-linear": ("llama", {**SIZES, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-tied": ("llama", {**SIZES, "tie_word_embeddings": True, "head_dim": 12}),
    "qwen2": ("qwen2", {**SIZES, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen2-window": ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "qwen2-windows-above": (
        "qwen2",
        {**SIZES, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "smollm3": ("smollm3", {**SIZES, "no_rope_layer_interval": 2, "pad_token_id": None}),
    "smollm3-list": (
        "smollm3",
        {
            **SIZES,
            "no_rope_layers": [0, 1, 0],
            "pad_token_id": None,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": ("qwen3", {**SIZES, "head_dim": 16, "rms_norm_eps": 1e-5}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 5, "head_dim": 8}),
    "mistral-no-window": ("mistral", {**SIZES, "sliding_window": None, "head_dim": 8}),
    "mixtral": ("mixtral", {**SIZES, "num_local_experts": 5}),
    "mixtral-window": ("mixtral", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 5}),
    "gemma": ("gemma", {**SIZES, "head_dim": 16}),
    "gemma-exact-gelu": ("gemma", {**SIZES, "head_dim": 8, "hidden_act": "gelu", "num_key_value_heads": 4}),
    "gemma3": (
        "gemma3_text",
        {
            **SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            },
        },
    ),
    "gemma2": (
        "gemma2",
        {
            **SIZES,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 5,
            "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 0.8,
        },
    ),
    "granite": (
        "granite",
        {
            **SIZES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("olmo2", {**SIZES, "rms_norm_eps": 1e-3}),
    "olmo3": (
        "olmo3",
        {**SIZES, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "olmoe": ("olmoe", {**SIZES, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmoe-normalized": ("olmoe", {**SIZES, "num_experts": 6, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "starcoder2": ("starcoder2", {**SIZES, "sliding_window": 5, "norm_epsilon": 1e-3}),
    "starcoder2-untied": ("starcoder2", {**SIZES, "sliding_window": None, "tie_word_embeddings": False}),
    "gpt-neox": ("gpt_neox", {**NEOX, "rotary_pct": 0.5, "rotary_emb_base": 500, "hidden_act": "gelu_new"}),
    "pythia": ("gpt_neox", {**NEOX, "use_parallel_residual": True}),
    "gpt-neox-quarter": ("gpt_neox", {**NEOX, "hidden_size": 64}),
    "llama-yarn": ("llama", {**SIZES, "rope_scaling": YARN}),
    "deepseek-v3": ("deepseek_v3", {**DEEPSEEK, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {
            **DEEPSEEK,
            "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5},
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek-v2": ("deepseek_v2", {**DEEPSEEK, "num_experts_per_tok": 3}),
    "glm4-moe": (
        "glm4_moe",
        {
            **SIZES,
            "head_dim": 16,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 2.5,
            "attention_bias": True,
            "use_qk_norm": True,
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {**SIZES, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "exaone4": ("exaone4", {**SIZES, "num_hidden_layers": 4, "sliding_window": 5, "rope_scaling": LLAMA3_SCALING}),
    "exaone-moe": (
        "exaone_moe",
        {
            **MIXTURE,
            "layer_types": None,
            "first_k_dense_replace": 0,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
    ),
    "afmoe": (
        "afmoe",
        {**MIXTURE, "num_dense_layers": 2, "num_shared_experts": 1, "route_scale": 2.5, "mup_enabled": True},
    ),
    "llama4": (
        "llama4_text",
        {
            **LLAMA4,
            "interleave_moe_layer_step": 2,
            "rope_parameters": {**LLAMA3_SCALING, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "rope_theta": 500.0},
        },
    ),
    "llama4-lists": (
        "llama4_text",
        {
            **LLAMA4,
            "moe_layers": [0, 1, 3],
            "no_rope_layers": [0, 1, 1, 0],
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            **SIZES,
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "swiglu_limit": 0.8,
            "pad_token_id": None,
            "rope_parameters": {**YARN, "rope_theta": 500.0, "truncate": False},
        },
    ),
    "mimo-v2-flash": (
        "mimo_v2_flash",
        {
            **MIXTURE,
            "num_experts": None,
            "n_routed_experts": 8,
            "v_head_dim": 10,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "apertus": ("apertus", {**SIZES, "rope_theta": 500.0, "rope_scaling": LLAMA3_SCALING, "pad_token_id": None}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            **SIZES,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [],
        },
    ),
}


CASES["qwen3-next"] = (
    "qwen3_next",
    {
        **SIZES,
        "num_hidden_layers": 4,
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 20,
        "linear_conv_kernel_dim": 3,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
    },
)
CASES["qwen3-next-list"] = (
    "qwen3_next",
    {**CASES["qwen3-next"][1], "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
)


NEEDS = {"deepseek": "latent_attention", "qwen3-next": "linear_attention"}
CASES = {
    name: case
    for name, case in CASES.items()
    if all(installed(extension) for start, extension in NEEDS.items() if name.startswith(start))
}


def save_model(case: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """Writes the random model of a case as a Hugging Face folder. No weight is left at a special value such as 1."""
    import transformers

    model_type, settings = CASES[case]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model.to(dtype).save_pretrained(folder, **options)
    return folder


def weights_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files."""
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def assert_same_weights(one: Path, two: Path) -> None:
    """Asserts that two folders hold the same tensors, byte for byte."""
    expected, found = weights_in(one), weights_in(two)
    assert expected and found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name].flatten().view(torch.uint8), value.flatten().view(torch.uint8)), name


def change_json(path: Path, **values: Any) -> None:
    """Replaces entries of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
