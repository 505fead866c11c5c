"""Conversion of a model configuration to Hugging Face's config.json. The conversion follows the tables of the model's
family, whose format `families` defines. This module does not import torch.

If the family's config.json cannot express a setting exactly, an error is raised. As a check, the keys are converted
back to a model configuration, which must equal the original configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from megatron.core.config.layers import RESIDUALS, layer_numbers
from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import router_of
from megatron.core.config.norms import NORMALIZATIONS
from megatron.extensions.interop.hugging_face.config_json.config_values import (
    Fields,
    Values,
    number,
    table,
    text,
    whole,
)
from megatron.extensions.interop.hugging_face.config_json.read_layers import FULL, LOCAL, pattern_text
from megatron.extensions.interop.hugging_face.config_json.read_rotary import LLAMA3_SCALING, PROPORTIONAL, YARN_SCALING
from megatron.extensions.interop.hugging_face.families import FAMILIES, Family
from megatron.extensions.interop.hugging_face.read_config import (
    config_from_hf,
    family_of,
    fields_of,
    product_of,
)
from megatron.training.config.saved_flags import training_only

OF_WINDOWS = (
    "window_rotary_base",
    "window_rotary_percent",
    "window_num_attention_heads",
    "window_num_query_groups",
    "window_kv_channels",
    "window_softmax_type",
)
"""Fields that only layers with a sliding window use."""


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
"""Maps a field prefix to the mixers that use fields with this prefix. Fields with the prefix have no effect on other
mixers."""


class Inexpressible(ValueError):
    """Raised if a family cannot express settings of a model."""

    def __init__(self, model_type: str, lost: list[str]) -> None:
        super().__init__(f"model_type {model_type} cannot have {', '.join(lost)}")
        self.lost = lost


def config_to_hf(config: TransformerConfig, model_type: str) -> Fields:
    """Convert a model configuration to a config.json. Raises ValueError for settings that the family cannot express."""
    family = family_of({"model_type": model_type})
    hf = _settings(config, family)
    if lost := _lost(config, hf):
        raise Inexpressible(model_type, lost)
    return hf


def _settings(config: TransformerConfig, family: Family) -> Fields:
    stated = _with_derived(config)
    hf = _of_tables(config, stated, family) | _positions_to_hf(config, family) | _windows_to_hf(config, family)
    if "mamba_expand" in family.defaults:
        channels = whole(stated, "mamba_num_heads") * whole(stated, "mamba_head_dim")
        hf["mamba_expand"] = channels // config.hidden_size
    if "mamba_d_ssm" in family.defaults:
        hf["mamba_d_ssm"] = whole(stated, "mamba_num_heads") * whole(stated, "mamba_head_dim")
    for adapter in family.adapters:
        hf = adapter.write(hf, config, stated, family)
    if config.head_dim % 2 and config.head_dim == config.hidden_size // config.num_attention_heads:
        # transformers refuses a config.json with an odd head_dim.
        hf = {key: value for key, value in hf.items() if key != "head_dim"}
    return _spelled(hf, family)


def _of_tables(config: TransformerConfig, stated: Values, family: Family) -> Fields:
    """Return the config.json keys that the family's tables define, with their values."""
    hf: Fields = {"architectures": [family.architecture], "model_type": family.model_type}
    hf |= {key: legal[0] for key, legal in family.only.items()}
    hf |= {key: _value_in_hf(family, key, stated[ours]) for key, ours in family.keys.items()}
    hf |= {key: config.num_layers // family.layers_each for key, ours in family.keys.items() if ours == "num_layers"}
    hf["tie_word_embeddings"] = config.tied_embeddings
    hf |= {key: hf[other] for key, other in family.equal.items()}
    for ours, powers in family.powers.items():
        hf |= _factor(hf, stated, ours, powers)
    if family.width_without_experts and config.num_experts is None:
        key = next(key for key, ours in family.keys.items() if ours == "num_experts")
        hf |= {key: 0, family.width_without_experts: config.ffn_size}
    if family.multi_token_key and config.mtp_depths:
        hf[family.multi_token_key] = config.mtp_depths
    return hf


def _positions_to_hf(config: TransformerConfig, family: Family) -> Fields:
    """Return the config.json keys for the rotary embedding. For a model without a rotary embedding, return the keys
    that disable the embedding, if the family has such keys."""
    positions = family.fixed.get("position_embedding_type", "any")
    if (config.position_embedding_type if positions in (None, "any") else positions) == "rope":
        return _rotary_to_hf(config, family)
    return {"rope_parameters": {"rope_type": "default", "rope_theta": None}} if positions is None else {}


def _windows_to_hf(config: TransformerConfig, family: Family) -> Fields:
    """Return the config.json keys for the size of the sliding window and for the layers that use the window."""
    if "window_size" in family.fixed or "window_size" in family.keys.values():
        return {}
    hf: Fields = {"sliding_window": config.window_size}
    if "use_sliding_window" in family.defaults:
        hf["use_sliding_window"] = config.window_size is not None
        hf |= {"max_window_layers": config.local_pattern.index(True)} if any(config.local_pattern) else {}
    if "attention_types" in family.defaults:
        hf["sliding_window"] = config.window_size or family.defaults["sliding_window"]
        hf["attention_types"] = [[["local" if local else "global" for local in config.local_pattern], 1]]
    usual = family.layer_types or "sliding_window_pattern" in family.defaults
    if usual and config.window_size is None and family.rotary_layers == "all":
        # Some transformers classes require a window size even if no layer has a window.
        hf["sliding_window"] = family.defaults.get("sliding_window")
    by_number = "no_rope_layers" in family.defaults and any(config.local_pattern)
    if usual or by_number or 0 < sum(config.local_pattern) < config.num_layers:
        hf["layer_types"] = [LOCAL if local else FULL for local in config.local_pattern]
    return hf


def _spelled(hf: Values, family: Family) -> Fields:
    """Convert keys and values to the form in the family's config.json. A key `object.key` is moved into a nested
    object, and numbers are converted to the type that the transformers class uses."""
    found: Fields = {}
    for key, value in hf.items():
        outer, _, inner = key.partition(".")
        if inner:
            if type(family.defaults.get(key)) is int and isinstance(value, float) and value.is_integer():
                value = int(value)
            found[outer] = table(found, outer) | {inner: value}
        elif key not in family.unwritten:
            name = family.spelling.get(key, key)
            found[name] = table(found, name) | value if isinstance(value, dict) else value
    return {key: _as_class(value, key, family) for key, value in found.items()}


def _as_class(value: object, key: str, family: Family) -> object:
    """Convert an integer to a float if the transformers class declares a float. Newer transformers classes reject
    integers for float fields."""
    usual = family.class_defaults.get(key)
    if usual is None:
        usual = family.defaults.get(key)
    return float(value) if isinstance(value, int) and type(value) is int and type(usual) is float else value


def _factor(hf: Values, stated: Values, field: str, powers: Mapping[str, float]) -> Fields:
    """Compute the value of the first config.json key in `powers` from the field's value and the values of the other
    keys. The field's value is the product of the values of all keys, each raised to its power. The result is empty if
    the field or one of the other keys is unset."""
    (key, power), *others = powers.items()
    if stated[field] is None or any(hf.get(other) is None for other, _ in others):
        return {}
    product = number(stated, field)
    value = (product / math.prod(number(hf, other) ** each for other, each in others)) ** (1 / power)
    short = round(value, 9)
    if short and product_of({**hf, key: short}, powers) == product:
        value = short
    return {key: int(value) if value.is_integer() else value}


def _lost(config: TransformerConfig, hf: Values) -> list[str]:
    """Return the model settings that are lost if the model is converted to the config.json `hf`."""
    expected, found = settings_of(config), settings_of(config_from_hf(hf))
    lost = [f"{name} = {value!r}" for name, value in expected.items() if found.get(name, value) != value]
    return lost + _unconditional_parts(config)


def _unconditional_parts(config: TransformerConfig) -> list[str]:
    """Return a description of each router and each residual stream that an extension adds to every model, regardless of
    the model's flags. A config.json cannot express these routers and residual streams."""
    plain = replace(config, extension_options=())
    of_experts = (number for number, kind in enumerate(plain.layers) if kind.experts)
    routers = {router_of(plain, number, in_training=False) for number in of_experts}
    return [f"router {name}" for name in sorted(routers - {"top_k"})] + [
        f"residual stream {name}" for name in RESIDUALS.wanted(plain)
    ]


def _value_in_hf(family: Family, key: str, value: object) -> object:
    """Convert the field value `value` to the corresponding value of the config.json key `key`. If there is no
    corresponding value, return the first supported value of the key."""
    if key not in family.values:
        return list(value) if isinstance(value, tuple) else value
    values = family.values[key]
    return next((theirs for theirs, ours in values.items() if ours == value), next(iter(values)))


def choose_family(config: TransformerConfig) -> str:
    """Return the first family that can express a model. Raises ValueError with the settings that the nearest family
    cannot express."""
    problems: list[ValueError] = []
    for model_type in FAMILIES:
        try:
            config_to_hf(config, model_type)
        except ValueError as error:
            problems.append(error)
        else:
            return model_type
    nearest = min(problems, key=lambda each: len(each.lost) if isinstance(each, Inexpressible) else math.inf)
    raise ValueError(f"no Hugging Face family can express this model; nearest: {nearest}")


def _rotary_to_hf(config: TransformerConfig, family: Family) -> Fields:
    hf: Fields = {"rope_theta": config.rotary_base}
    if config.rotary_percent != 1 or "partial_rotary_factor" in family.defaults:
        hf["partial_rotary_factor"] = config.rotary_percent
    if "rotary_dim" in family.defaults:
        hf["rotary_dim"] = config.rotary_dim
    scaling = _scaling_to_hf(config)
    if "rope_local_base_freq" in family.defaults:
        return _rotary_by_kind(config, hf, scaling)
    if scaling or "rope_parameters" in family.defaults:
        hf["rope_scaling"] = scaling or {"rope_type": "default"}
    return hf


def _scaling_to_hf(config: TransformerConfig) -> Fields:
    """Return the config.json keys for rotary scaling, which extends a model to longer contexts. The result is empty if
    there is no scaling."""
    if config.use_rope_scaling:
        return {key: getattr(config, ours) for key, ours in LLAMA3_SCALING.items()} | {"rope_type": "llama3"}
    if _stretches(config):
        scaling: Fields = {"rope_type": "yarn"} | {key: getattr(config, ours) for key, ours in YARN_SCALING.items()}
        if config.mscale_all_dim:
            scaling |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
        if not config.yarn_correction_range_round_to_int:
            scaling["truncate"] = False
        return scaling
    if _in_proportion(config):
        return {"rope_type": PROPORTIONAL, "factor": config.rotary_seq_len_interpolation_factor or 1.0}
    if config.rotary_seq_len_interpolation_factor:
        return {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    return {}


def _rotary_by_kind(config: TransformerConfig, hf: Fields, scaling: Fields) -> Fields:
    """Return the rotary embeddings of layers with a sliding window and of layers without a sliding window. Context
    scaling applies only to layers without a sliding window."""
    full = {"rope_type": "default", **scaling, "rope_theta": config.rotary_base}
    local: Fields = {"rope_type": "default", "rope_theta": config.window_rotary_base}
    local = full if config.window_rotary_base is None else local
    if "partial_rotary_factor" in hf or config.window_rotary_percent is not None:
        percent = hf.pop("partial_rotary_factor", config.rotary_percent)
        full = {**full, "partial_rotary_factor": percent}
        local = {**local, "partial_rotary_factor": config.window_rotary_percent or percent}
    return hf | {"rope_parameters": {FULL: full, LOCAL: local}}


def _stretches(config: TransformerConfig) -> bool:
    """Return True if YaRN scaling changes the rotary frequencies."""
    return config.yarn and config.rotary_scaling_factor != 1


def _in_proportion(config: TransformerConfig) -> bool:
    """Return True if the rotary type is proportional and its frequencies differ from the default rotary frequencies."""
    return config.rotary_type == PROPORTIONAL and config.rotary_percent != 1


def _with_derived(config: TransformerConfig) -> Fields:
    """Return all fields of a model's configuration. The values of unset fields are derived from other fields."""
    fields = fields_of(config)
    if fields.get("csa_compress_ratios"):
        # Drop the compression ratios of multi-token prediction modules.
        ratios = layer_numbers(text(fields, "csa_compress_ratios"), None, least=0)
        fields["csa_compress_ratios"] = str([*ratios[: config.num_layers]])
    mamba_width = whole(fields, "mamba_head_dim") if "mamba_head_dim" in fields else 64
    return fields | {
        "latent_norm_epsilon": fields.get("latent_norm_epsilon") or config.norm_epsilon,
        "multi_latent_attention": config.attention == "multi_latent_attention",
        "activation_func": config.activation,
        "ffn_hidden_size": config.ffn_size,
        "ffn_hidden_size_pattern": str([*config.ffn_sizes]) if len({*config.ffn_sizes}) > 1 else None,
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
        "rope_type": "yarn" if _stretches(config) else PROPORTIONAL if _in_proportion(config) else "rope",
        "value_channels": config.value_head_dim,
        "window_num_attention_heads": config.window_num_attention_heads or config.num_attention_heads,
        "window_num_query_groups": config.window_num_query_groups or config.query_groups,
        "window_kv_channels": config.window_kv_channels or config.head_dim,
        "window_softmax_type": config.window_softmax_type or config.softmax_type,
        "window_rotary_percent": config.window_rotary_percent or config.rotary_percent,
        "linear_norm_epsilon": fields.get("linear_norm_epsilon") or config.norm_epsilon,
        "linear_norm_placement": fields.get("linear_norm_placement") or config.norm_placement,
        "rg_lru_width": fields.get("rg_lru_width") or config.hidden_size,
        "rg_lru_num_blocks": fields.get("rg_lru_num_blocks") or config.num_attention_heads,
        "mamba1_channels": fields.get("mamba1_channels") or 2 * config.hidden_size,
        "mamba1_step_rank": fields.get("mamba1_step_rank") or math.ceil(config.hidden_size / 16),
        "mamba1_norm_epsilon": fields.get("mamba1_norm_epsilon") or config.norm_epsilon,
        "mamba_num_heads": fields.get("mamba_num_heads") or 2 * config.hidden_size // mamba_width,
    }


def settings_of(config: TransformerConfig) -> Fields:
    """Return the fields that affect the model's outputs. Derived values are filled in, and fields without an effect on
    the outputs are omitted."""
    fields = _with_derived(config)
    rotary, attends = config.position_embedding_type == "rope", any(layer.attends for layer in config.layers)
    if not rotary:
        fields |= {"no_rope_freq": None, "window_rotary_base": None}
    idle = ["swiglu", "quick_geglu", "squared_relu", "bias_gelu_fusion"]  # these determine `activation_func`
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
    idle += ["ffn_hidden_size"] if not config.dense_layers or fields["ffn_hidden_size_pattern"] else []
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
