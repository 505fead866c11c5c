"""Writes a model's configuration as Hugging Face's config.json, with the tables of `families`. No torch.

A setting that a family cannot express is an error, never an approximation: what is written is read again and compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.config.layers import layer_numbers
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import HF_FAMILIES, NORMALIZATIONS, RESIDUALS, router_of
from megatron.extensions.hugging_face.families import Family
from megatron.extensions.hugging_face.read_config import (
    COMPRESSED,
    SELECTED,
    config_from_hf,
    family_of,
    fields_of,
    product_of,
)
from megatron.extensions.hugging_face.read_layers import CHUNKED, FULL, LOCAL, pattern_text, selecting
from megatron.extensions.hugging_face.read_rotary import LLAMA3_SCALING, YARN_SCALING
from megatron.training.config.saved_flags import training_only

OF_WINDOWS = (
    "window_rotary_base",
    "window_rotary_percent",
    "window_num_attention_heads",
    "window_num_query_groups",
    "window_softmax_type",
)
"""Fields of layers with a sliding window."""


OF_MIXERS = {
    "mamba_": ("mamba2",),
    "mamba1_": ("mamba1",),
    "rg_lru_": ("rg_lru",),
    "short_conv_": ("short_convolution",),
    "dsa_": ("dsa", "dsv4_hybrid"),
    "csa_": ("dsv4_hybrid",),
    "o_": ("dsv4_hybrid",),
    "lightning_": ("lightning_attention",),
    "kda_": ("kimi_delta_attention",),
}
"""What names of fields begin with -> the linear attentions that alone read them."""


class Inexpressible(ValueError):
    """A family lacks settings of a model."""

    def __init__(self, model_type: str, lost: list[str]) -> None:
        super().__init__(f"model_type {model_type} cannot have {', '.join(lost)}")
        self.lost = lost


def config_to_hf(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    """Converts to a config.json. Raises ValueError for settings that the family cannot express."""
    family = family_of({"model_type": model_type})
    hf = _settings(config, family)
    if lost := _lost(config, hf):
        raise Inexpressible(model_type, lost)
    return hf


def _settings(config: TransformerConfig, family: Family) -> dict[str, Any]:
    model_type = family.model_type
    hf: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    hf |= {key: legal[0] for key, legal in family.only.items()}
    stated = _with_derived(config)
    hf |= {key: _value_in_hf(family, key, stated[ours]) for key, ours in family.keys.items()}
    hf |= {key: config.num_layers // family.layers_each for key, ours in family.keys.items() if ours == "num_layers"}
    hf["tie_word_embeddings"] = config.tied_embeddings
    hf |= {key: hf[other] for key, other in family.equal.items()}
    for ours, powers in family.powers.items():
        hf |= _factor(hf, stated[ours], powers)
    if "first_k_dense_replace" in family.defaults:
        hf["first_k_dense_replace"] = config.moe_layers[0] if config.moe_layers else config.num_layers
    if "mlp_only_layers" in family.defaults:
        hf |= {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}
    if "mlp_layer_types" in family.defaults:
        hf["mlp_layer_types"] = ["sparse" if experts else "dense" for experts in config.expert_pattern]
    if family.width_without_experts and config.num_experts is None:
        key = next(key for key, ours in family.keys.items() if ours == "num_experts")
        hf |= {key: 0, family.width_without_experts: config.ffn_size}
    if family.multi_token_key and config.mtp_depths:
        hf[family.multi_token_key] = config.mtp_depths
    positions = family.fixed.get("position_embedding_type", "any")
    if (config.position_embedding_type if positions in (None, "any") else positions) == "rope":
        hf |= _rotary_to_hf(config, family)
    elif positions is None:
        hf["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    if "window_size" not in family.fixed and "window_size" not in family.keys.values():
        hf["sliding_window"] = config.window_size
        if "use_sliding_window" in family.defaults:
            hf["use_sliding_window"] = config.window_size is not None
            hf |= {"max_window_layers": config.local_pattern.index(True)} if any(config.local_pattern) else {}
        if "attention_types" in family.defaults:
            hf["sliding_window"] = config.window_size or family.defaults["sliding_window"]
            hf["attention_types"] = [[["local" if local else "global" for local in config.local_pattern], 1]]
        usual = family.layer_types or "sliding_window_pattern" in family.defaults
        if usual and config.window_size is None and family.rotary_layers == "all":
            # Some classes want a number, which no layer looks at.
            hf["sliding_window"] = family.defaults.get("sliding_window")
        by_number = "no_rope_layers" in family.defaults and any(config.local_pattern)
        if usual or by_number or 0 < sum(config.local_pattern) < config.num_layers:
            hf["layer_types"] = [LOCAL if local else FULL for local in config.local_pattern]
    if "full_attention_interval" in family.defaults:
        hf["layer_types"] = [family.linear_kind if linear else FULL for linear in config.linear_pattern]
    if "attn_layer_indices" in family.defaults:
        hf["attn_layer_indices"] = [layer for layer, linear in enumerate(config.linear_pattern) if not linear]
    if "indexer_types" in family.defaults:
        period, offset = stated["dsa_indexer_topk_freq"], stated["dsa_indexer_skip_topk_offset"]
        full = selecting(period, max(offset, 1), config.num_layers)
        hf["indexer_types"] = ["full" if each else "shared" for each in full]
    if "block_types" in family.defaults:
        hf["block_types"] = ["recurrent" if linear else "attention" for linear in config.linear_pattern]
        hf["intermediate_size"] *= 2
    if "attn_layer_period" in family.defaults:
        hf |= _period("attn", [not linear for linear in config.linear_pattern])
        hf |= _period("expert", config.expert_pattern) | {"num_experts": config.num_experts or 1}
    if "block_auto_adjust_ff_dim" in family.defaults:
        hf["block_auto_adjust_ff_dim"] = False
    if "mamba_expand" in family.defaults:
        hf["mamba_expand"] = stated["mamba_num_heads"] * stated["mamba_head_dim"] // config.hidden_size
    if "mamba_d_ssm" in family.defaults:
        hf["mamba_d_ssm"] = stated["mamba_num_heads"] * stated["mamba_head_dim"]
    if "attention_chunk_size" in family.defaults:
        hf["attention_chunk_size"] = config.attention_chunk_size
        hf["layer_types"] = [CHUNKED if local else FULL for local in config.local_pattern]
    if "attn_temperature_tuning" in family.defaults:
        coeff = config.attention_temperature_coeff
        hf |= {"attn_temperature_tuning": coeff > 0, "attn_scale": coeff or family.defaults["attn_scale"]}
    if "layer_rope_theta" in family.defaults:
        bases = [(config.window_rotary_base if local else None) or config.rotary_base for local in config.local_pattern]
        hf["layer_rope_theta"] = [base * rotated for base, rotated in zip(bases, config.rope_pattern, strict=True)]
    if "num_attention_heads_per_layer" in family.defaults:
        heads = [config.of_layer(layer).num_attention_heads for layer in range(config.num_layers)]
        hf["num_attention_heads_per_layer"] = heads
    if "topk_method" in family.only and (config.moe_router_num_groups or 1) > 1:
        groups = {"n_group": config.moe_router_num_groups, "topk_group": config.moe_router_group_topk}
        hf |= {"topk_method": "group_limited_greedy", **groups}
    if "moe_layers" in family.defaults:
        hf["moe_layers"] = list(config.moe_layers)
    if "no_rope_layers" in family.defaults:
        hf["no_rope_layers"] = [int(rotated) for rotated in config.rope_pattern]
    if "compress_rates" in family.defaults:
        hf |= _compressed_to_hf(config, stated, hf.pop("rope_scaling", {"rope_type": "default"}))
    if "hybrid_override_pattern" in family.keys:  # keys of kinds of layers that the model lacks
        hf = {key: value for key, value in hf.items() if value is not None}
    if config.head_dim % 2 and config.head_dim == config.hidden_size // config.num_attention_heads:
        hf = {key: value for key, value in hf.items() if key != "head_dim"}  # transformers refuses odd ones
    found: dict[str, Any] = {}
    for key, value in hf.items():
        outer, _, name = key.partition(".")
        if name:
            is_count = type(family.defaults.get(key)) is int and type(value) is float and value.is_integer()
            found.setdefault(outer, {})[name] = int(value) if is_count else value
        elif key not in family.unwritten:
            name = family.spelling.get(key, key)
            found[name] = found.get(name, {}) | value if isinstance(value, dict) else value
    return {key: _as_class(value, family.class_defaults.get(key)) for key, value in found.items()}


def _as_class(value: Any, usual: Any) -> Any:
    """A whole number as a float where the family's class has a float: newer classes refuse another type."""
    return float(value) if type(value) is int and type(usual) is float else value


def _period(of: str, layers: Sequence[bool]) -> dict[str, int]:
    """Period and offset of some layers, as far as they have these."""
    first, *others = [number for number, chosen in enumerate(layers) if chosen] or [len(layers)]
    period = others[0] - first if others else len(layers) + 1
    return {f"{of}_layer_period": period, f"{of}_layer_offset": first}


def _compressed_to_hf(
    config: TransformerConfig, stated: Mapping[str, Any], scaling: Mapping[str, Any]
) -> dict[str, Any]:
    """Layers of DeepSeek-V4, whose layers with compressed keys have one ratio other than 4 at most."""
    layers, ratios = config.num_layers, layer_numbers(stated["csa_compress_ratios"] or "", config.num_layers, least=0)
    heavy = next((ratio for ratio in ratios if ratio not in (0, 4)), 128)
    kinds, hashed = {0: LOCAL, 4: SELECTED}, stated.get("moe_n_hash_layers", 0)
    percent = stated["qk_pos_emb_head_dim"] / stated["v_head_dim"]
    both = {"main": {"rope_type": "default", "rope_theta": config.rotary_base}, "compress": {**scaling}}
    both["compress"]["rope_theta"] = stated["csa_compress_rotary_base"]
    if scaling.get("rope_type") == "yarn":
        both["compress"]["attention_factor"] = 1.0
    return {
        "layer_types": [kinds.get(ratio, COMPRESSED) for ratio in ratios],
        "compress_rates": {SELECTED: 4, COMPRESSED: heavy},
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "partial_rotary_factor": percent,
        "compress_rope_theta": stated["csa_compress_rotary_base"],
        "rope_parameters": {kind: {**each, "partial_rotary_factor": percent} for kind, each in both.items()},
    }


def _factor(hf: Mapping[str, Any], product: float | None, powers: Mapping[str, float]) -> dict[str, Any]:
    """The first of the keys that a field is a product of, with the value that follows from the others'."""
    (key, power), *others = powers.items()
    if product is None or any(hf.get(other) is None for other, _ in others):
        return {}
    value = (product / math.prod(hf[other] ** each for other, each in others)) ** (1 / power)
    short = round(value, 9)
    if short and product_of({**hf, key: short}, powers) == product:
        value = short
    return {key: int(value) if value.is_integer() else value}


def _lost(config: TransformerConfig, hf: Mapping[str, Any]) -> list[str]:
    """Settings of a model that a config.json made of it does not express."""
    expected, found = settings_of(config), settings_of(config_from_hf(hf))
    lost = [f"{name} = {value!r}" for name, value in expected.items() if found.get(name, value) != value]
    return lost + _unconditional_parts(config)


def _unconditional_parts(config: TransformerConfig) -> list[str]:
    """Routers and residual streams that extensions give every model, whatever its flags say. No key stands for them."""
    plain = replace(config, extension_options=())
    routers = {router_of(plain, number) for number, kind in enumerate(plain.layers) if kind.experts} - {"top_k"}
    return [f"router {name}" for name in sorted(routers)] + [
        f"residual stream {name}" for name in RESIDUALS.wanted(plain)
    ]


def _value_in_hf(family: Family, key: str, value: Any) -> Any:
    """The value of a key of config.json that means `value` of our field; another if there is none."""
    if key not in family.values:
        return list(value) if isinstance(value, tuple) else value
    values = family.values[key]
    return next((theirs for theirs, ours in values.items() if ours == value), next(iter(values)))


def choose_family(config: TransformerConfig) -> str:
    """The first family that can express a model. Raises ValueError that says what the nearest one lacks."""
    problems: list[ValueError] = []
    for model_type in HF_FAMILIES:
        try:
            config_to_hf(config, model_type)
        except ValueError as error:
            problems.append(error)
        else:
            return model_type
    nearest = min(problems, key=lambda each: len(each.lost) if isinstance(each, Inexpressible) else math.inf)
    raise ValueError(f"no Hugging Face family can express this model; of the nearest, {nearest}")


def _rotary_to_hf(config: TransformerConfig, family: Family) -> dict[str, Any]:
    hf: dict[str, Any] = {"rope_theta": config.rotary_base}
    if config.rotary_percent != 1 or "partial_rotary_factor" in family.defaults:
        hf["partial_rotary_factor"] = config.rotary_percent
    if "rope_parameters" in family.defaults:
        hf.setdefault("rope_scaling", {"rope_type": "default"})
    if "rotary_dim" in family.defaults:
        hf["rotary_dim"] = config.rotary_dim
    if config.use_rope_scaling:
        hf["rope_scaling"] = {key: getattr(config, ours) for key, ours in LLAMA3_SCALING.items()}
        hf["rope_scaling"]["rope_type"] = "llama3"
    elif _stretches(config):
        hf["rope_scaling"] = {"rope_type": "yarn"} | {key: getattr(config, ours) for key, ours in YARN_SCALING.items()}
        if config.mscale_all_dim:
            hf["rope_scaling"] |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
        if not config.yarn_correction_range_round_to_int:
            hf["rope_scaling"]["truncate"] = False
    elif config.rotary_seq_len_interpolation_factor:
        hf["rope_scaling"] = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    if "rope_local_base_freq" not in family.defaults:
        return hf
    full = {"rope_type": "default", **hf.pop("rope_scaling", {}), "rope_theta": config.rotary_base}
    local = {"rope_type": "default", "rope_theta": config.window_rotary_base}
    local = full if config.window_rotary_base is None else local
    if "partial_rotary_factor" in hf or config.window_rotary_percent is not None:
        percent = hf.pop("partial_rotary_factor", config.rotary_percent)
        full, local = ({**each, "partial_rotary_factor": percent} for each in (full, local))
        local["partial_rotary_factor"] = config.window_rotary_percent or percent
    return hf | {"rope_parameters": {FULL: full, LOCAL: local}}


def _stretches(config: TransformerConfig) -> bool:
    """Whether YaRN changes anything."""
    return config.yarn and config.rotary_scaling_factor != 1


def _with_derived(config: TransformerConfig) -> dict[str, Any]:
    """All fields, those that leave open what others say with the value that follows."""
    fields = fields_of(config)
    if text := fields.get("csa_compress_ratios"):  # without those of modules of multi-token prediction
        fields["csa_compress_ratios"] = str([*layer_numbers(text, None, least=0)[: config.num_layers]])
    return fields | {
        "latent_norm_epsilon": fields.get("latent_norm_epsilon") or config.norm_epsilon,
        "multi_latent_attention": config.attention == "multi_latent_attention",
        "activation_func": config.activation,
        "ffn_hidden_size": config.ffn_size,
        "kv_channels": config.head_dim,
        "softmax_scale": config.attention_scale,
        "num_query_groups": config.query_groups,
        "group_query_attention": True,
        "max_position_embeddings": config.max_positions,
        "add_qkv_bias": config.add_qkv_bias or config.add_bias_linear,
        "add_attention_output_bias": config.add_attention_output_bias or config.add_bias_linear,
        "add_mlp_bias": config.add_mlp_bias or config.add_bias_linear,
        "norm_parameters": "weight"
        if not NORMALIZATIONS.facts(config.normalization).biased and fields["norm_parameters"] == "all"
        else fields["norm_parameters"],
        "moe_ffn_hidden_size": config.moe_ffn_size,
        "moe_router_score_function": config.moe_router_scores.removeprefix("pre_"),
        "moe_router_pre_softmax": config.moe_router_scores == "pre_softmax",
        "moe_layer_freq": pattern_text(config.expert_pattern, usual=True) or "1",
        "window_attn_skip_freq": pattern_text(config.local_pattern, usual=True) if any(config.local_pattern) else None,
        "no_rope_freq": pattern_text([not rotated for rotated in config.rope_pattern], usual=False),
        "experimental_attention_variant": config.experimental_attention_variant if any(config.linear_pattern) else None,
        "linear_attention_freq": pattern_text(config.linear_pattern, usual=True)
        if any(config.linear_pattern)
        else None,
        "moe_router_num_groups": config.moe_router_num_groups or 1,
        "moe_router_group_topk": config.moe_router_group_topk or 1,
        "moe_router_group_score_topk": None
        if (config.moe_router_num_groups or 1) == 1
        else config.moe_router_group_score_topk or config.moe_router_topk // (config.moe_router_group_topk or 1),
        "moe_router_topk_scaling_factor": config.moe_router_topk_scaling_factor or 1.0,
        "attention_module": config.attention,
        "rope_type": "yarn" if _stretches(config) else "rope",
        "value_channels": config.value_head_dim,
        "window_num_attention_heads": config.window_num_attention_heads or config.num_attention_heads,
        "window_num_query_groups": config.window_num_query_groups or config.query_groups,
        "window_softmax_type": config.window_softmax_type or config.softmax_type,
        "window_rotary_percent": config.window_rotary_percent or config.rotary_percent,
        "linear_norm_epsilon": fields.get("linear_norm_epsilon") or config.norm_epsilon,
        "linear_norm_placement": fields.get("linear_norm_placement") or config.norm_placement,
        "rg_lru_width": fields.get("rg_lru_width") or config.hidden_size,
        "rg_lru_num_blocks": fields.get("rg_lru_num_blocks") or config.num_attention_heads,
        "mamba1_channels": fields.get("mamba1_channels") or 2 * config.hidden_size,
        "mamba1_step_rank": fields.get("mamba1_step_rank") or math.ceil(config.hidden_size / 16),
        "mamba1_norm_epsilon": fields.get("mamba1_norm_epsilon") or config.norm_epsilon,
        "mamba_num_heads": fields.get("mamba_num_heads") or 2 * config.hidden_size // fields.get("mamba_head_dim", 64),
    }


def settings_of(config: TransformerConfig) -> dict[str, Any]:
    """Fields that affect the model's outputs, with derived values. Fields without effect are left out."""
    fields = _with_derived(config)
    rotary, attends = config.position_embedding_type == "rope", any(layer.attends for layer in config.layers)
    if not rotary:
        fields |= {"no_rope_freq": None, "window_rotary_base": None}
    idle = ["swiglu", "quick_geglu", "squared_relu", "bias_gelu_fusion"]  # of activation_func
    idle += training_only()
    idle += [name for name in fields if name.startswith("rotary_") and not rotary]
    yarn = (*YARN_SCALING.values(), "mscale", "mscale_all_dim", "yarn_correction_range_round_to_int")
    idle += yarn if not (rotary and _stretches(config)) else ()
    idle += ["rope_type"] if not rotary else []
    idle += ["rotary_interleaved"] if not config.attention_facts.grouped else []
    idle += [name for name in fields if name.startswith("rope_scaling_") and not (rotary and config.use_rope_scaling)]
    idle += ["max_position_embeddings"] if config.position_embedding_type != "learned_absolute" else []
    idle += [name for name in fields if name.startswith("moe_") and config.num_experts is None]
    divided = config.moe_router_topk_normalization and config.moe_router_scores in ("sigmoid", "sqrtsoftplus")
    idle += ["moe_router_topk_epsilon"] if not divided else []
    idle += ["ffn_hidden_size"] if not config.dense_layers else []
    idle += ["num_query_groups", "softmax_scale"] if not attends else []
    heads = attends or "lightning_attention" in config.linear_attentions
    idle += ["num_attention_heads", "kv_channels"] if not heads else []
    idle += [
        name
        for start, mixers in OF_MIXERS.items()
        for name in fields
        if name.startswith(start) and not {*mixers} & {*config.linear_attentions}
    ]
    idle += ["residual_weight"] if config.layer_module != "normed_residual" else []
    idle += ["moe_token_drop_policy", "moe_min_capacity"] if not config.moe_drops_tokens else []
    idle += [name for name in fields if name.startswith("linear_") and not any(config.linear_pattern)]
    idle += [name for name in fields if name in OF_WINDOWS and not any(config.local_pattern)]
    idle += ["window_rotary_percent"] if not rotary else []
    idle += ["parallel_residual_shared_norm"] if not config.parallel_residual else []
    idle += ["qk_layernorm_scope", "qk_layernorm_after_rotary"] if not config.qk_layernorm else []
    idle += ["latent_norm_epsilon"] if config.attention != "multi_latent_attention" or not config.qk_layernorm else []
    idle += ["attention_temperature_floor"] if not config.attention_temperature_coeff else []
    return {name: value for name, value in fields.items() if name not in idle}
