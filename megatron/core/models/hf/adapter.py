"""Converts weights and configurations between Hugging Face's format and ours, with the tables of `families`.

Everything here is a pure function. A setting that a family cannot express is an error, never an approximation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.parameters import parameter_metas
from megatron.core.models.hf.families import Family, Rule
from megatron.core.param_meta import ParamMeta
from megatron.core.parts import HF_FAMILIES

# Fields that affect how a model is trained or stored, but not its outputs.
TRAINING_ONLY = (
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "make_vocab_size_divisible_by",
    "seq_length",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_bias_update_rate",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_per_layer_logging",
)
LLAMA3_SCALING = {
    "factor": "rope_scaling_factor",
    "low_freq_factor": "rope_scaling_low_freq_factor",
    "high_freq_factor": "rope_scaling_high_freq_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Family of a config.json. Raises ValueError for an unknown one."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in HF_FAMILIES:
        raise ValueError(f"config.json: model_type {model_type!r} is not supported; known are {', '.join(HF_FAMILIES)}")
    return HF_FAMILIES[model_type]


# Configurations


def config_from_hf(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """Converts a config.json. seq_length becomes its longest context.

    Raises ValueError listing every setting that cannot be expressed.
    """
    family = family_of(hf_config)
    hf = {**family.defaults, **{family.aliases.get(key, key): value for key, value in hf_config.items()}}
    problems = [
        f"{key} = {hf[key]!r}, supported: {' or '.join(map(repr, legal))}"
        for key, legal in family.only.items()
        if hf[key] not in legal
    ]
    problems += [f"{key} is missing" for key in family.keys if key not in hf]
    if hf.get("embd_pdrop", hf.get("resid_pdrop")) != hf.get("resid_pdrop"):
        problems.append(f"embd_pdrop = {hf['embd_pdrop']!r} differs from resid_pdrop = {hf['resid_pdrop']!r}")
    if problems:
        raise ValueError(f"config.json of a {family.model_type} model: " + "; ".join(problems))
    fields = {ours: hf[key] for key, ours in family.keys.items()}
    fields |= family.fixed
    fields["seq_length"] = fields["max_position_embeddings"]
    fields["untie_embeddings_and_output_weights"] = not hf["tie_word_embeddings"]
    if fields.get("num_query_groups") == fields["num_attention_heads"]:
        fields["num_query_groups"] = None
    fields["group_query_attention"] = fields.get("num_query_groups") is not None
    if fields["position_embedding_type"] == "rope":
        fields |= _rotary_from_hf(hf)
    fields.setdefault("window_size", _window_from_hf(hf))
    return TransformerConfig(**fields)


def _rotary_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Reads rotary settings from `rope_theta` and `rope_scaling`, or from `rope_parameters` of newer files."""
    merged = {**(hf.get("rope_scaling") or {}), **(hf.get("rope_parameters") or {})}
    kind = merged.get("rope_type", merged.get("type", "default"))
    fields: dict[str, Any] = {
        "rotary_base": float(merged.get("rope_theta", hf.get("rope_theta", 10000.0))),
        "rotary_percent": float(merged.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))),
    }
    if kind == "llama3":
        fields["use_rope_scaling"] = True
        fields |= {ours: merged[key] for key, ours in LLAMA3_SCALING.items()}
    elif kind != "default":
        raise ValueError(f"config.json: rotary scaling of type {kind!r} is not supported; known are default, llama3")
    return fields


def _window_from_hf(hf: Mapping[str, Any]) -> int | None:
    """Sliding window of all layers, or None. Raises ValueError if only some layers have one."""
    window, layers = hf.get("sliding_window"), hf.get("num_hidden_layers", 0)
    if not window or not hf.get("use_sliding_window", True):
        return None
    first = hf.get("max_window_layers", 0) if "use_sliding_window" in hf else 0
    kinds = hf.get("layer_types") or ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ValueError("config.json: a sliding window in some layers only is not supported")
    return window


def config_to_hf(config: TransformerConfig, model_type: str) -> dict[str, Any]:
    """Converts to a config.json. Raises ValueError for settings that the family cannot express."""
    family = family_of({"model_type": model_type})
    hf: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    hf |= {key: legal[0] for key, legal in family.only.items()}
    stated = replace(config, **_stated(config))
    hf |= {key: getattr(stated, ours) for key, ours in family.keys.items()}
    hf["tie_word_embeddings"] = config.tied_embeddings
    if family.fixed["position_embedding_type"] == "rope":
        hf |= _rotary_to_hf(config)
    else:
        hf["embd_pdrop"] = config.hidden_dropout
    if "window_size" not in family.fixed and model_type != "gpt2":
        hf["sliding_window"] = config.window_size
        if model_type != "mistral":
            hf["use_sliding_window"] = config.window_size is not None
            hf |= {"max_window_layers": 0} if config.window_size else {}
    expected, found = _computed(config), _computed(config_from_hf(hf))
    lost = [f"{name} = {value!r}" for name, value in expected.items() if found.get(name, value) != value]
    if lost:
        raise ValueError(f"a {model_type} model cannot have {', '.join(lost)}")
    return hf


def _rotary_to_hf(config: TransformerConfig) -> dict[str, Any]:
    hf: dict[str, Any] = {"rope_theta": config.rotary_base}
    if config.rotary_percent != 1:
        hf["partial_rotary_factor"] = config.rotary_percent
    if config.use_rope_scaling:
        hf["rope_scaling"] = {key: getattr(config, ours) for key, ours in LLAMA3_SCALING.items()}
        hf["rope_scaling"]["rope_type"] = "llama3"
    return hf


def _stated(config: TransformerConfig) -> dict[str, Any]:
    """Derived defaults of fields as explicit values."""
    return {
        "ffn_hidden_size": config.ffn_size,
        "kv_channels": config.head_dim,
        "num_query_groups": config.query_groups,
        "group_query_attention": True,
        "max_position_embeddings": config.max_positions,
        "add_qkv_bias": config.add_qkv_bias or config.add_bias_linear,
        "moe_ffn_hidden_size": config.moe_ffn_size,
        "moe_layer_freq": "1" if len(config.moe_layers) == config.num_layers else config.moe_layer_freq,
    }


def _computed(config: TransformerConfig) -> dict[str, Any]:
    """Fields that affect the model's outputs. Fields without effect are left out."""
    fields = asdict(replace(config, **_stated(config)))
    rotary = config.position_embedding_type == "rope"
    idle = list(TRAINING_ONLY)
    idle += [name for name in fields if name.startswith("rotary_") and not rotary]
    idle += [name for name in fields if name.startswith("rope_scaling_") and not (rotary and config.use_rope_scaling)]
    idle += ["max_position_embeddings"] if rotary else []
    idle += [name for name in fields if name.startswith("moe_") and config.num_experts is None]
    idle += ["ffn_hidden_size"] if len(config.moe_layers) == config.num_layers else []
    idle += ["moe_token_drop_policy"] if config.moe_expert_capacity_factor is None else []
    return {name: value for name, value in fields.items() if name not in idle}


# Weights


def from_hf(state_dict: Mapping[str, Tensor], config: TransformerConfig, model_type: str) -> dict[str, Tensor]:
    """Converts their tensors to our whole parameters, by name. Raises ValueError listing all mismatches."""
    family = family_of({"model_type": model_type})
    tensors = _checkpoint_names(state_dict, family)
    found: dict[str, Tensor] = {}
    problems: list[str] = []
    for meta, rule in _rules_of(config, family):
        missing = [name for name in rule.theirs if name not in tensors]
        if missing:
            problems += [f"{name} is missing" for name in missing]
            continue
        parts = tuple(tensors.pop(name) for name in rule.theirs)
        problems += _place(found, meta, rule, config, parts)
    problems += _check_tied_head(tensors, found, config)
    problems += [f"{name} is unknown" for name in tensors]
    if problems:
        raise ValueError(f"weights of a {model_type} model: " + "; ".join(problems))
    return found


def to_hf(parameters: Mapping[str, Tensor], config: TransformerConfig, model_type: str) -> dict[str, Tensor]:
    """Converts our whole parameters, by name, to their tensors. Leaves out a tied head, as their files do."""
    family = family_of({"model_type": model_type})
    rules = _rules_of(config, family)
    missing = [meta.name for meta, _ in rules if meta.name not in parameters]
    if missing:
        raise ValueError(f"parameters missing: {', '.join(missing)}")
    return {
        name: tensor
        for meta, rule in rules
        for name, tensor in zip(rule.theirs, rule.layout.theirs(config, parameters[meta.name]), strict=True)
    }


@torch.no_grad()
def copy_shards_(
    parameters: Iterable[Tensor], whole: Mapping[str, Tensor], coords: Mapping[str, tuple[int, int]]
) -> None:
    """Copies into each parameter its shard of the whole parameter of the same name. Frozen ones may be missing."""
    for parameter in parameters:
        meta: ParamMeta = parameter.meta  # type: ignore[attr-defined]
        if meta.name not in whole and not parameter.requires_grad:
            continue
        offset, shape = meta.box(coords)
        box = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
        parameter.copy_(whole[meta.name][box])


def _checkpoint_names(state_dict: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Their tensors under full names, without tensors that are not weights."""
    bare = not any(name.startswith(family.prefix) for name in state_dict)
    return {
        family.prefix + name if bare and not name.startswith("lm_head.") else name: tensor
        for name, tensor in state_dict.items()
        if not name.endswith(tuple(family.ignored))
    }


def _rules_of(config: TransformerConfig, family: Family) -> list[tuple[ParamMeta, Rule]]:
    """Each parameter of the model with its rule, with the layer number filled in."""
    rules = {rule.ours: rule for rule in family.rules}
    found = []
    for meta in parameter_metas(config):
        parts = meta.name.split(".")
        layer = parts[2] if meta.name.startswith("decoder.layers.") else ""
        pattern = ".".join((*parts[:2], "{i}", *parts[3:])) if layer else meta.name
        if pattern not in rules:
            raise ValueError(f"a {family.model_type} model cannot have {meta.name}")
        rule = rules[pattern]
        found.append((meta, replace(rule, theirs=tuple(_names(rule, layer, config.num_experts or 0)))))
    return found


def _names(rule: Rule, layer: str, experts: int) -> Iterator[str]:
    """Their names with the layer number filled in, expert by expert."""
    names = [name.replace("{i}", layer) for name in rule.theirs]
    if any("{e}" in name for name in names):
        return (name.replace("{e}", str(expert)) for expert in range(experts) for name in names)
    return iter(names)


def _place(
    found: dict[str, Tensor], meta: ParamMeta, rule: Rule, config: TransformerConfig, parts: tuple[Tensor, ...]
) -> list[str]:
    """Adds a parameter to `found`, or returns the problems of its parts."""
    names = ", ".join(rule.theirs)
    shapes = ", ".join(str(list(part.shape)) for part in parts)
    try:
        parameter = rule.layout.ours(config, parts)
    except RuntimeError:
        return [f"{names} of shape {shapes} do not fit the configuration"]
    if tuple(parameter.shape) != meta.global_shape:
        return [f"{names} of shape {shapes} make {list(parameter.shape)}, not {list(meta.global_shape)} of {meta.name}"]
    found[meta.name] = parameter
    return []


def _check_tied_head(tensors: dict[str, Tensor], found: dict[str, Tensor], config: TransformerConfig) -> list[str]:
    """Checks that a stored copy of a tied head equals the embedding."""
    if not config.tied_embeddings or "lm_head.weight" not in tensors:
        return []
    head, embedding = tensors.pop("lm_head.weight"), found.get("embedding.word_embeddings.weight")
    if embedding is None or torch.equal(head, embedding[: config.vocab_size]):
        return []
    return ["lm_head.weight differs from the word embeddings that config.json says it is tied to"]
