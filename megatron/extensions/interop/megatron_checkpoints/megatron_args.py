"""Megatron-LM's arguments as a configuration of ours. This module does not import torch.

Fields of the configuration have the names of Megatron-LM's arguments, so that most values are taken as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.config.model import TransformerConfig
from megatron.core.config.moe import ROUTERS, router_of
from megatron.core.config.norms import NORMALIZATIONS
from megatron.training.config.flags import config_of_sections, flags_of, named_value, spelling_table, value_of
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress

TRAINING = ("micro_batch_size", "global_batch_size", "rampup_batch_size", "train_iters", "train_samples", "seed")
"""Fields of the training section that are taken."""

SECTIONS = ("model", "optimizer", "tokenizer")
"""Sections that are taken as a whole."""

WITHOUT_EQUAL = {
    "apply_residual_connection_post_layernorm": "residual connections after the norm",
    "heterogeneous_layers_config_path": "layers of different shapes",
    "heterogeneous_layers_config_encoded_json": "layers of different shapes",
    "add_bias_linear_fc": "biases in some layers",
    "use_mup": "muP",
    "head_wise_attn_gate": "gates of attention's heads",
    "scale_embeddings": "scaled embeddings",
    "fp32_residual_connection": "an fp32 residual stream",
    "apply_query_key_layer_scaling": "query-key layer scaling",
    "enable_hyper_connections": "hyper-connections",
    "enable_mhc_connections": "hyper-connections",
    "moe_n_hash_layers": "routing by hashes of tokens",
}
"""Argument -> the part of the model it asks for, which this program has not."""

LACKING = (
    *("position_offset", "qk_layernorm_after_rotary", "attention_temperature_everywhere"),
    *("moe_output_norm", "moe_expert_bias_on_logits", "moe_zero_experts"),
    *("attention_gate_function", "moe_router_group_score_topk", "moe_router_topk_normalization"),
    "moe_router_topk_epsilon",
    *("add_output_layer_bias", "parallel_residual_shared_norm"),
    *("norm_parameters", "clip_qkv", "add_attention_output_bias", "add_mlp_bias"),
    *("embed_layernorm", "parallel_residual", "attention_chunk_size", "attention_temperature_coeff", "softmax_scale"),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "scale_word_embeddings", "value_channels"),
    *("attention_value_scale", "final_logit_softcapping", "attn_logit_softcapping", "window_rotary_base"),
    *("window_rotary_percent", "window_softmax_type", "window_num_attention_heads", "window_num_query_groups"),
    *("window_kv_channels",),
    *("mla_head_gate", "mla_latent_gate", "mla_scale_latents", "latent_norm_epsilon", "mtp_layer_kind"),
    "linear_allow_neg_eigval",
    *("linear_num_householder", "linear_norm_epsilon", "linear_norm_placement", "mamba_conv_kernel_dim"),
    *("mamba_min_step_size", "mamba_norm", "mamba_norm_before_gate", "mamba_multipliers"),
)
"""Fields of the model which Megatron-LM has not: with another value than the default it cannot be expressed."""

ATTENTION = ("self_attention", "multi_latent_attention")
POSITIONS = ("learned_absolute", "rope", "none")
MIXERS = ("gated_delta_net", "dsa", "mamba2")
HYBRID_LETTERS = frozenset("M*-EG")
"""Letters of the layers of a HybridModel that are converted."""

YARN = (
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "correction_range_round_to_int"),
)
"""YaRN arguments of a GPTModel without latent attention; each name has the prefix `yarn_`."""


def config_of(args: Mapping[str, object], padding_counts: bool) -> RunConfig:
    """The configuration of a run with these arguments. Raises ValueError for a model that cannot be expressed.

    `padding_counts`: rows of the embedding that only pad the vocabulary count as tokens. Megatron-LM's loss includes
    them and ours does not, so that a run continues exactly only if they are tokens.
    """
    problems = [f"{name} {args[name]}: {what}" for name, what in WITHOUT_EQUAL.items() if args.get(name)]
    args = _translated(args)
    pattern = args.get("hybrid_layer_pattern")
    if args.get("is_hybrid_model") and not pattern:
        problems.append("is_hybrid_model without hybrid_layer_pattern: layers by ratios")
    if pattern and (unknown := set(str(pattern)) - HYBRID_LETTERS):
        problems.append(f"hybrid_layer_pattern {pattern}: layers {' '.join(sorted(unknown))}")
    if (variant := args.get("experimental_attention_variant")) not in (None, *MIXERS):
        problems.append(f"experimental_attention_variant {variant}")
    if variant == "dsa" and (args.get("dsa_indexer_rope_interleaved") is not False):
        problems.append("experimental_attention_variant dsa without dsa_indexer_rope_interleaved False")
    if args.get("apply_layernorm_1p") and (variant == "gated_delta_net" or "G" in str(pattern)):
        problems.append("apply_layernorm_1p True: norms of gated delta nets around 1")
    if "M" in str(pattern) and args.get("norm_epsilon", 1e-5) != 1e-5:
        problems.append("norm_epsilon: norms of Mamba-2 with 1e-5, and others with another value")
    positions = args.get("position_embedding_type", "learned_absolute")
    if positions not in POSITIONS:
        problems.append(f"position_embedding_type {positions}")
    if args.get("qk_l2_norm") and args.get("no_rope_freq"):
        problems.append("qk_l2_norm True with no_rope_freq: norms in layers without rotary embedding")
    if args.get("num_experts") and args.get("add_bias_linear", True):
        problems.append("add_bias_linear True: biases of experts, which are not converted")
    if problems:
        raise ValueError("its model cannot be expressed: " + "; ".join(problems))
    values: dict[str, dict[str, object]] = {}
    training = (flag for flag in flags_of("training") if flag.field in TRAINING)
    for flag in (*(flag for section in SECTIONS for flag in flags_of(section)), *training):
        if (value := args.get(flag.field)) is not None:
            values.setdefault(flag.section, {})[flag.field] = _plain(value, flag.kind, flag.field)
    model = values.setdefault("model", {})
    model |= _vocabulary(args, padding_counts)
    if "norm_epsilon" not in args and "layernorm_epsilon" in args:
        model["norm_epsilon"] = args["layernorm_epsilon"]
    if not args.get("group_query_attention"):
        model["num_query_groups"] = None
    values["parallel"] = {name: bool(args.get(name)) for name in ("fp16", "bf16")}
    try:
        return config_of_sections(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"its arguments cannot be read: {error}") from None


def _translated(args: Mapping[str, object]) -> dict[str, object]:
    """Arguments with YaRN, patterns of layers and gated delta nets as they are called here."""
    found = dict(args)
    if found.get("position_embedding_type") == "yarn":
        found |= {"position_embedding_type": "rope", "rope_type": "yarn"}
        given = {_our_yarn(name): args.get(f"yarn_{name}") for name in YARN}
        found |= {name: value for name, value in given.items() if value is not None}
    elif not found.get("multi_latent_attention"):
        found["rope_type"] = None
    if (pattern := found.get("hybrid_layer_pattern") or found.get("hybrid_override_pattern")) is not None:
        found |= {"hybrid_layer_pattern": str(pattern).replace("|", ""), "experimental_attention_variant": None}
    if found.get("experimental_attention_variant") == "gdn":
        found["experimental_attention_variant"] = "gated_delta_net"
    return found


def yarn_arguments(config: RunConfig) -> dict[str, object]:
    """The arguments of YaRN of a GPTModel, beside those under our names, which latent attention has."""
    if not config.model.yarn or config.model.attention != "self_attention":
        return {}
    values = {name: named_value(config, _our_yarn(name)) for name in YARN}
    return {"position_embedding_type": "yarn"} | {f"yarn_{name}": value for name, value in values.items()}


def _our_yarn(name: str) -> str:
    return f"yarn_{name}" if name == YARN[-1] else name


def _with_value(config: RunConfig, name: str) -> str:
    """A flag with its value; a switch, and text that is more than a flag, as it is."""
    flag, _ = spelling_table().get(name, (None, True))
    return name if flag is None or flag.kind is bool else f"{name} {value_of(config, flag)}"


def refuse_inexpressible(config: RunConfig) -> None:
    """Raises ValueError for a model of ours that Megatron-LM has not."""
    model = config.model
    lacking = (flag for flag in flags_of("model") if flag.field in LACKING)
    problems = {flag.name: value_of(config, flag) != flag.default for flag in lacking} | {
        "--qk-l2-norm in some layers": model.qk_l2_norm and not all(model.rope_pattern),
        "--norm-placement": not model.norms_inputs or model.norms_outputs,
        f"--qk-layernorm-scope {model.qk_layernorm_scope}": model.qk_layernorm and model.qk_layernorm_scope != "head",
        f"--position-embedding-type {model.position_embedding_type}": model.position_embedding_type not in POSITIONS,
        f"--moe-router-score-function {model.moe_router_score_function}": model.moe_router_score_function
        not in ROUTERS.facts("top_k").scores,
        "--moe-router-enable-expert-bias with scores of softmax": model.moe_router_enable_expert_bias
        and model.moe_router_score_function == "softmax",
        "--rope-type proportional": model.rotary_type == "proportional",
        "--activation-func": model.activation_func not in (None, "gelu", "squared_relu", "swiglu", "quick_geglu"),
    }
    if found := [_with_value(config, flag) for flag, used in problems.items() if used]:
        raise ValueError(f"--to megatron: Megatron-LM has no {', '.join(found)}")
    pattern = named_value(config, "hybrid_layer_pattern") or ""
    mixers = MIXERS if pattern else MIXERS[:-1]
    used = {kind.linear for kind in model.layers if kind.linear is not None}
    unwritten = {
        "--head-wise-attn-gate": model.head_wise_attn_gate,
        "--ffn-hidden-size-pattern": model.ffn_hidden_size_pattern,
        f"--hybrid-layer-pattern {pattern}": set(pattern) - HYBRID_LETTERS,
        **{f"{mixer} layers": mixer not in mixers for mixer in sorted(used)},
        "--enable-mhc-connections": model.residual == "mhc",
        "--moe-shortcut": model.residual == "moe_shortcut",
        "--moe-n-hash-layers": any(getattr(each, "moe_n_hash_layers", 0) for each in model.extension_options),
        "--layer-module": model.layer_module != "transformer_layer",
        **_unwritten_parts(model),
        "--apply-layernorm-1p and gated delta nets": model.apply_layernorm_1p and "gated_delta_net" in used,
        "--norm-epsilon other than 1e-5 and Mamba-2": model.norm_epsilon != 1e-5 and "mamba2" in used,
        "--hybrid-layer-pattern with --mtp-num-layers": bool(pattern) and model.mtp_depths,
        "biases of experts": model.add_bias_linear and any(model.expert_pattern),
    }
    if found := [flag for flag, used in unwritten.items() if used]:
        raise ValueError(f"--to megatron: models with {found[0]} are not converted to Megatron-LM's format")


def _unwritten_parts(model: TransformerConfig) -> dict[str, bool]:
    """The parts of a model's function that the format has no names for, by flag."""
    kinds = (*model.layers, *model.mtp_layers)
    routers = {router_of(model, number, in_training=False) for number, kind in enumerate(kinds) if kind.experts}
    return {
        f"--normalization {model.normalization}": not NORMALIZATIONS.facts(model.normalization).standard,
        f"--attention-module {model.attention}": model.attention not in ATTENTION,
        f"residual stream {model.residual}": model.residual is not None,
        **{f"router {name}": name != "top_k" for name in routers},
    }


def _plain(value: object, kind: type, field: str) -> object:
    """A value in the type of our field."""
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
    """Iteration and samples that a run has consumed. Raises ValueError if the checkpoint does not state it."""
    iteration = _count("iteration", common.get("iteration", args.get("iteration")))
    samples = _count("consumed_samples", args.get("consumed_train_samples"))
    scheduler = common.get("opt_param_scheduler")
    steps = scheduler.get("num_steps") if isinstance(scheduler, Mapping) else None
    return Progress(iteration, samples, scheduled_samples=steps if isinstance(steps, int) else samples)


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"its {name} is {value!r:.40}")
    return value
