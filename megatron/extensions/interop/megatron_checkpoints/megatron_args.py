"""Conversion between Megatron-LM's arguments and this program's configuration. This module does not import torch.

Configuration fields have the names of Megatron-LM's arguments, so most values are copied unchanged. `arguments.json`
lists the arguments that need a conversion. Its table `also` maps arguments to fields with a different name. `refused`
lists arguments that request unsupported model features. `lacking` lists model fields that Megatron-LM lacks, so that
only their defaults can be expressed. `written` lists argument values that every written checkpoint contains, regardless
of the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron.core.config.moe import ROUTERS, router_of
from megatron.core.config.norms import NORMALIZATIONS
from megatron.training.config.flags import (
    config_of_sections,
    flags_of,
    flat_values,
    named_value,
    spelling_table,
    value_of,
)
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress

DATA = json.loads(Path(__file__).with_name("arguments.json").read_text())
LACKING = frozenset(" ".join(DATA["lacking"]).split())
YARN = {ours: "yarn_" + ours.removeprefix("yarn_") for ours in DATA["yarn"].split()}
"""Maps this program's names of YaRN arguments to Megatron-LM's names, for a GPTModel without latent attention. With
latent attention, both programs use the same names."""

ATTENTION = ("self_attention", "multi_latent_attention")
POSITIONS = ("learned_absolute", "rope", "none")
MIXERS = ("gated_delta_net", "dsa", "mamba2")
LETTERS = frozenset("M*-EG/|")
"""Supported layer letters and separators in a HybridModel's layer pattern."""

OTHER_FORMULAS = (
    "hyper-connections: the parameters equal Megatron-LM's, but its formulas add different epsilons, so that outputs "
    "differ slightly"
)

WIDTHS = "heterogeneous_layers_config"
HASHED = "moe_n_hash_layers"


def config_of(args: Mapping[str, object], padding_counts: bool) -> RunConfig:
    """Return the configuration of a run that Megatron-LM started with the arguments `args`. Raises ValueError if this
    program does not support the model.

    If `padding_counts` is True, padding rows of the vocabulary are treated as tokens. The softmax in Megatron-LM's loss
    includes padding rows; this program's softmax includes only tokens. Therefore, `padding_counts` must be True if the
    run is to continue with the same loss.
    """
    _check(args := _translated(args))
    values: dict[str, dict[str, object]] = {}
    training = (flag for flag in flags_of("training") if flag.field in DATA["training"].split())
    for flag in (*(flag for section in DATA["sections"].split() for flag in flags_of(section)), *training):
        if (value := args.get(flag.field)) is not None:
            values.setdefault(flag.section, {})[flag.field] = _plain(value, flag.kind, flag.field)
    model = values.setdefault("model", {})
    model |= _vocabulary(args, padding_counts)
    if not args.get("group_query_attention"):
        model["num_query_groups"] = None
    values["parallel"] = {name: bool(args.get(name)) for name in ("fp16", "bf16")}
    try:
        return config_of_sections(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its arguments cannot be read: {error}") from None


def _check(args: Mapping[str, object]) -> None:
    """Raise ValueError if the arguments request model features that this program does not support."""
    variant, positions = args.get("experimental_attention_variant"), args.get("position_embedding_type", POSITIONS[0])
    pattern = str(args.get("hybrid_layer_pattern") or "")
    unknown = " ".join(sorted(set(pattern) - LETTERS))
    problems = {f"{name} {args.get(name)}: {what}": args.get(name) for name, what in DATA["refused"].items()} | {
        "is_hybrid_model without hybrid_layer_pattern, that is, layer kinds by ratios": args.get("is_hybrid_model")
        and not pattern,
        f"hybrid_layer_pattern {pattern}: layers {unknown}": unknown,
        f"experimental_attention_variant {variant}": variant not in (None, *MIXERS),
        "experimental_attention_variant dsa without dsa_indexer_rope_interleaved False": variant == "dsa"
        and args.get("dsa_indexer_rope_interleaved") is not False,
        f"position_embedding_type {positions}": positions not in POSITIONS,
        f"{WIDTHS}_path without {WIDTHS}_encoded_json": args.get(f"{WIDTHS}_path")
        and not args.get(f"{WIDTHS}_encoded_json"),
    }
    if found := [problem for problem, holds in problems.items() if holds]:
        raise ValueError("its model cannot be expressed: " + "; ".join(found))


def _translated(args: Mapping[str, object]) -> dict[str, object]:
    """Convert the names and values of Megatron-LM's arguments to this program's names and values."""
    found = dict(args)
    for name, ours in DATA["also"].items():
        if args.get(name) is not None and not found.get(ours):
            found[ours] = args[name]
    if found.get("position_embedding_type") == "yarn":
        found |= {"position_embedding_type": "rope", "rope_type": "yarn"}
        found |= {ours: args[name] for ours, name in YARN.items() if args.get(name) is not None}
    elif not found.get("multi_latent_attention"):
        found["rope_type"] = None
    if found.get("experimental_attention_variant") == "gdn":
        found["experimental_attention_variant"] = "gated_delta_net"
    if args.get("mhc_learned_output_contract") is False:
        found["mhc_output_contract"] = "mean"
    if (pattern := found.get("hybrid_layer_pattern")) is not None:
        modules, depths = args.get("mtp_hybrid_override_pattern"), args.get("mtp_num_layers")
        pattern = str(pattern).replace("|", "")
        if modules and isinstance(depths, int) and "/" not in pattern:
            pattern += f"/{modules}" * depths
        found |= {"hybrid_layer_pattern": pattern, "experimental_attention_variant": None}
        if hashed := found.get(HASHED):
            # The argument counts MoE layers, but this program's field counts all layers.
            experts = [number for number, letter in enumerate(pattern.split("/")[0], 1) if letter == "E"]
            found[HASHED] = experts[hashed - 1] if isinstance(hashed, int) and hashed <= len(experts) else hashed
    return found | _widths(args)


def _widths(args: Mapping[str, object]) -> dict[str, object]:
    """Return the configuration fields for a model whose layers have different MLP widths. Raises ValueError if the
    layers also differ in other sizes."""
    text = args.get(f"{WIDTHS}_encoded_json")
    if not text:
        return {}
    groups, widths = set[Any](), list[Any]()
    try:
        for block in json.loads(str(text))["block_configs"]:
            attention, mlp = block["attention"], block.get("ffn") or block["mlp"]
            if any(part.get(way) for part in (attention, mlp) for way in ("no_op", "replace_with_linear")):
                raise ValueError(f"{WIDTHS}: layers without attention or without an MLP")
            if (heads := attention.get("n_heads_in_group")) is not None:
                groups.add(args["num_attention_heads"] // heads)
            else:
                groups.add(attention.get("num_query_groups") or args["num_query_groups"])
            if (factor := mlp.get("ffn_mult")) is not None:
                widths.append(-(int(2 * factor * args["hidden_size"] / 3) // -256) * 256)
            else:
                widths.append(mlp.get("ffn_hidden_size") or args["ffn_hidden_size"])
    except (LookupError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{WIDTHS} cannot be read ({type(error).__name__})") from None
    if len(groups) != 1:
        raise ValueError(f"{WIDTHS}: layers with {sorted(groups)} query groups")
    return {"group_query_attention": True, "num_query_groups": groups.pop(), "ffn_hidden_size_pattern": str(widths)}


def arguments_of(config: RunConfig) -> dict[str, object]:
    """Convert a configuration to Megatron-LM's arguments."""
    model = config.model
    found = flat_values(config)
    pattern, text = _pattern(config), model.linear_attention_freq
    linear = [int(each) for each in model.linear_pattern] if text and not text.isdecimal() else text and int(text)
    freq = [int(layer in model.moe_layers) for layer in range(model.num_layers)]
    found |= DATA["written"] | {
        "padded_vocab_size": model.padded_vocab_size,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.kv_channels or model.hidden_size // model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "max_position_embeddings": model.max_positions,
        "moe_ffn_hidden_size": model.moe_ffn_size if model.moe_layers else None,
        "moe_layer_freq": freq if not pattern and len({*freq}) > 1 else 1,
        "linear_attention_freq": None if pattern else linear,
        "is_hybrid_model": bool(pattern),
        "hybrid_layer_pattern": pattern,
        "add_position_embedding": model.position_embedding_type == "learned_absolute",
        "mhc_learned_output_contract": named_value(config, "mhc_output_contract") != "mean",
    }
    if model.yarn and model.attention == "self_attention":
        found |= {"position_embedding_type": "yarn"} | {name: found[ours] for ours, name in YARN.items()}
    if model.ffn_hidden_size_pattern:
        heads = {"num_query_groups": model.query_groups}
        blocks = [{"attention": heads, "mlp": {"ffn_hidden_size": width}} for width in model.ffn_sizes]
        found |= {f"{WIDTHS}_path": "in encoded_json", f"{WIDTHS}_encoded_json": json.dumps({"block_configs": blocks})}
    if hashed := found.get(HASHED):
        found |= dict.fromkeys(("actual_vocab_size", "hash_moe_vocab_size"), model.padded_vocab_size)
        found[HASHED] = sum(model.expert_pattern[:hashed]) if pattern else hashed
    return found | {name: found[ours] for name, ours in DATA["also"].items() if ours in found}


def _pattern(config: RunConfig) -> str | None:
    """Return the layer pattern of a HybridModel, followed by the patterns of its multi-token prediction modules.
    Return None for a model without a layer pattern."""
    text = named_value(config, "hybrid_layer_pattern")
    layers, *modules = (text or "").replace("|", "").split("/")
    return "/".join((layers, *(modules or layers[-1:] * config.model.mtp_depths))) or None


def refuse_inexpressible(config: RunConfig) -> None:
    """Raise ValueError if Megatron-LM does not support the model."""
    model = config.model
    lacking = (flag for flag in flags_of("model") if flag.field in LACKING)
    problems = {flag.name: value_of(config, flag) != flag.default for flag in lacking} | {
        "--norm-placement": not model.norms_inputs or model.norms_outputs,
        f"--qk-layernorm-scope {model.qk_layernorm_scope}": model.qk_layernorm and model.qk_layernorm_scope != "head",
        f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type not in POSITIONS,
        f"--moe-router-score-function {model.moe_router_score_function}": model.moe_router_score_function
        not in ROUTERS.facts("top_k").scores,
        "--moe-router-enable-expert-bias with softmax scores": model.moe_router_enable_expert_bias
        and model.moe_router_score_function == "softmax",
        "--rope-type proportional": model.rotary_type == "proportional",
        "--activation-func": model.activation_func not in (None, "gelu", "squared_relu", "swiglu", "quick_geglu"),
    }
    if found := [_with_value(config, flag) for flag, used in problems.items() if used]:
        raise ValueError(f"--to megatron: Megatron-LM does not support {', '.join(found)}")
    if found := unequal_parts(config):
        raise ValueError(f"--to megatron: models with {found[0]} cannot be converted to Megatron-LM's format")


def unequal_parts(config: RunConfig) -> list[str]:
    """Return descriptions of the model features for which Megatron-LM's format has no parameter names, or which
    Megatron-LM computes differently."""
    return [part for part, used in _unequal(config) if used]


def _unequal(config: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield a pair for each model feature that cannot be converted. The pair contains the description of the feature,
    and a value that is true if the model uses the feature."""
    model, pattern = config.model, _pattern(config) or ""
    kinds = (*model.layers, *model.mtp_layers)
    used = {kind.linear for kind in kinds if kind.linear is not None}
    routers = {router_of(model, number, in_training=False) for number, kind in enumerate(kinds) if kind.experts}
    softmax = model.moe_router_score_function == "softmax" and not model.moe_router_pre_softmax
    other = routers or used or pattern or model.residual or model.mtp_depths or model.attention != "self_attention"
    yield from ((f"{mixer} layers", mixer not in MIXERS[: 3 if pattern else 2]) for mixer in sorted(used))
    yield from ((f"router {router}", router not in ("top_k", "hash")) for router in sorted(routers))
    yield "--head-wise-attn-gate", model.head_wise_attn_gate
    yield f"--hybrid-layer-pattern {pattern}", set(pattern) - LETTERS
    differ = len({*pattern.split("/")[1:]}) > 1
    yield f"--hybrid-layer-pattern {pattern}, whose multi-token prediction modules differ", differ
    yield f"--layer-module {model.layer_module}", model.layer_module != "transformer_layer"
    yield f"--normalization {model.normalization}", not NORMALIZATIONS.facts(model.normalization).standard
    yield f"--attention-module {model.attention}", model.attention not in ATTENTION
    yield f"residual stream {model.residual}", model.residual not in (None, "mhc")
    yield "--enable-mhc-connections and --mtp-num-layers", model.residual == "mhc" and model.mtp_depths
    yield f"--ffn-hidden-size-pattern {model.ffn_hidden_size_pattern}", model.ffn_hidden_size_pattern and other
    yield "--moe-n-hash-layers and softmax scores over the chosen experts", "hash" in routers and softmax
    yield "biases of shared experts", model.add_bias_linear and model.moe_shared_expert_intermediate_size
    yield "--qk-l2-norm in some layers", model.qk_l2_norm and not all(model.rope_pattern)
    yield "--apply-layernorm-1p and gated delta nets", model.apply_layernorm_1p and "gated_delta_net" in used
    yield "--norm-epsilon other than 1e-5 and Mamba-2", model.norm_epsilon != 1e-5 and "mamba2" in used


def _with_value(config: RunConfig, name: str) -> str:
    """Return a flag followed by its value. If `name` is a Boolean flag or not a flag at all, `name` is returned
    unchanged."""
    flag, _ = spelling_table().get(name, (None, True))
    return name if flag is None or flag.kind is bool else f"{name} {value_of(config, flag)}"


def _plain(value: object, kind: type, field: str) -> object:
    """Convert a value to the type of the configuration field."""
    if field in ("moe_layer_freq", "no_rope_freq", "window_attn_skip_freq", "linear_attention_freq"):
        return str(value)
    if field == "window_size":
        return value[0] + 1 if isinstance(value, list | tuple) else value
    if isinstance(value, list | tuple):
        return tuple(_plain(each, kind, "") for each in value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and not isinstance(value, str):
        return str(value)
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"its argument {field} is a {type(value).__name__}")
    return value


def _vocabulary(args: Mapping[str, object], padding_counts: bool) -> dict[str, object]:
    padded, size = args.get("padded_vocab_size"), args.get("vocab_size")
    if not isinstance(padded, int):
        raise ValueError("its arguments have no padded_vocab_size")
    return {"vocab_size": padded if padding_counts or not size else size, "pad_vocab_size_to": padded}


def progress_of(common: Mapping[str, object], args: Mapping[str, object]) -> Progress:
    """Return the iteration and the consumed samples of a run. Raises ValueError if the checkpoint does not record the
    iteration or the samples."""
    iteration = _count("iteration", common.get("iteration", args.get("iteration")))
    samples = _count("consumed_samples", args.get("consumed_train_samples"))
    scheduler = common.get("opt_param_scheduler")
    steps = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    return Progress(iteration, samples, scheduled_samples=steps if isinstance(steps, int) else samples)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"its {name} is {value!r:.40}")
    return value
