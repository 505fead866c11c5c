"""Reads a model's configuration from Hugging Face's config.json, with the tables of `families`. No torch.

Everything but `read_json` is a pure function. A setting that we cannot express is an error, never an approximation. A
config.json may come from anyone: what has the wrong type or an impossible value is a ValueError of one line.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import chain, cycle
from pathlib import Path
from typing import Any, get_type_hints

from megatron.core.config.json_text import parse_json
from megatron.core.config.model import TransformerConfig
from megatron.core.parts import HF_FAMILIES
from megatron.extensions.hugging_face.families import (
    Family,
    by_precedence,
    derived_values,
    inner_values,
    usual_names,
    usual_values,
)
from megatron.extensions.hugging_face.family_files import common_keys, missing_part
from megatron.extensions.hugging_face.read_layers import (
    LOCAL,
    broken_rule,
    check_count,
    chunks_from_hf,
    linear_layers,
    listed_layers,
    moe_layers_from_hf,
    pattern_from_hf,
    pattern_text,
    periodic,
    repeated,
    rotated_layers,
    selections_from_hf,
    window_from_hf,
    windows,
)
from megatron.extensions.hugging_face.read_rotary import bases_from_hf, by_kind, rotary_from_hf, yarn_from_hf
from megatron.extensions.hybrid_layers.flags import EXPERTS
from megatron.training.config.flags import dashed, flags_of, home_of, run_of, sections, value_of, with_fields
from megatron.training.config.rules.fields import number_rule
from megatron.training.config.rules.moe import expert_groups

SELECTED, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
"""Layers of DeepSeek-V4 that select compressed keys, or see all."""

KIND_OF_RATIO = {0: LOCAL, 4: SELECTED, 128: COMPRESSED}
"""Entry of `compress_ratios` in older files -> kind of the layer."""

FIELDS_OF = {"M": ("mamba_",), EXPERTS: ("moe_", "num_experts")}
"""Letter of a layer -> what fields begin with that only such layers have."""

MULTIMODAL = {"llama4": "language_model."}
"""model_type of a model of images and text -> what the names of its text model's weights begin with."""


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises ValueError otherwise."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def text_model(hf_config: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The config.json of the text model of a folder, and what the names of its weights begin with: of a multimodal
    model its part for text, which alone is read, and of others the file as it is. Raises ValueError."""
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MULTIMODAL:
        return dict(hf_config), ""
    found = hf_config.get("text_config")
    if not isinstance(found, dict):
        raise ValueError(f"config.json: text_config of model_type {model_type} must be an object")
    shared = {key: hf_config[key] for key in ("tie_word_embeddings", "quantization_config") if key in hf_config}
    return {"model_type": f"{model_type}_text", **shared, **found}, MULTIMODAL[model_type]


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """Family of a config.json. Raises ValueError for an unknown one."""
    model_type = hf_config.get("model_type")
    if isinstance(model_type, str) and model_type in HF_FAMILIES:
        return HF_FAMILIES[model_type]
    if missing := missing_part("families", model_type):
        raise ValueError(f"config.json: model_type {model_type!r} is not supported: it needs {missing}")
    known = f"known are {', '.join(HF_FAMILIES)}; --hf-family FILE adds one"
    raise ValueError(f"config.json: model_type {model_type!r} is not supported; {known}")


LAYER_BY_LAYER = "per_layer_config"
"""Key that changes others for some layers, in every family."""

IDLE = {
    *(
        "torch_dtype",
        "dtype",
        "_name_or_path",
        "name_or_path",
        "auto_map",
        "model_type",
        "use_cache",
        "use_return_dict",
    ),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "quantization_config", "rope_theta"),
    *("rope_scaling", "rope_parameters", "attn_implementation", "_attn_implementation", "tie_word_embeddings"),
    *("transformers_weights", "layer_types", "output_attentions"),
}
"""Keys of any family's config.json that describe no layer, or that are read apart from the tables."""


OLDER = ("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers", "qk_rope_head_dim")
"""Keys of older files, in families with `compress_rates`."""


WRITTEN: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "qk_head_dim": lambda hf: hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
    "head_dim": lambda hf: hf["qk_rope_head_dim"],
    "_sliding_window_pattern": lambda hf: hf.get("sliding_window_pattern", 6),
    "num_key_value_heads": lambda hf: 1 if hf["multi_query"] else hf["n_head"],
    "attention_layers": lambda hf: repeated(hf["attention_types"], len(hf["attention_layers"]) + 1),
    "final_w_init_variance_scale": lambda hf: 2 / hf["num_hidden_layers"],
}
"""Keys that some classes of transformers write beside those that they read, and what they derive them from."""


def unread_keys(hf_config: Mapping[str, Any]) -> Iterator[str]:
    """A notice of the keys of a config.json that neither the family nor its class in transformers knows, or that have
    another value than the class derives."""
    family = family_of(hf_config)
    tables = (family.keys, family.defaults, family.only, family.values, family.equal, family.aliases, family.spelling)
    known = {*chain(*tables), *family.spelling.values(), *family.class_defaults, *family.class_names, *IDLE}
    known |= {
        *chain(*family.powers.values()),
        *family.class_names.values(),
        *(OLDER if "compress_rates" in family.defaults else ()),
        family.multi_token_key or "",
        family.earlier_tokens or "",
        *common_keys(),
    }
    known |= {key.partition(".")[0] for key in known if key}
    whole = {**usual_values(family, usual_names(family)), **family.class_defaults, **hf_config}
    unknown = sorted(key for key in hf_config.keys() - known if not _is_derived(key, whole))
    if family.class_defaults and unknown:
        yield f"config.json: {family.model_type} has no {', '.join(unknown)}: not read"


def _is_derived(key: str, whole: Mapping[str, Any]) -> bool:
    """Whether a key has the value that classes derive for it."""
    if key == LAYER_BY_LAYER:
        return not whole[key]
    try:
        return key in WRITTEN and bool(WRITTEN[key](whole) == whole[key])
    except (TypeError, LookupError, ArithmeticError, ValueError):
        return False


def config_from_hf(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """Converts a config.json. seq_length becomes its longest context.

    Raises ValueError listing every setting that cannot be expressed.
    """
    family = family_of(hf_config)
    hf_config = {**hf_config, **inner_values(hf_config, family)}
    names = usual_names(family)
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in hf_config.items()}
    hf = usual_values(family, names) | {names.get(key, key): listed[key] for key in by_precedence(listed, family)}
    try:
        hf |= derived_values(hf, family, names)
        if "hybrid_override_pattern" in family.keys:
            hf |= pattern_from_hf(hf)
        problems = list(_problems(hf, family))
        config = None if problems else _config(hf, family)
        problems += [] if config is None else [*_out_of_bounds(config), *_of_single_layers(hf, family, config)]
        if config is not None and config.position_embedding_type == "rope" and config.rotary_dim == 1:
            problems = [f"1 of {config.head_dim} channels of a head is rotated, and two rotate together"]
    except KeyError as error:
        problems = [f"{error.args[0]} is missing"]
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        problems = [f"a value has the wrong type or is missing ({type(error).__name__}: {error})"]
    if problems or config is None:
        raise ValueError(f"config.json of model_type {family.model_type}: " + "; ".join(problems))
    return config


def _out_of_bounds(config: TransformerConfig) -> list[str]:
    """Values outside the bounds of their flags, and groups of experts that have none to choose."""
    if config.head_dim < 1:
        return [f"a head has no channel: hidden_size {config.hidden_size} for {config.num_attention_heads} heads"]
    flags, values = {flag.field: flag for flag in flags_of("model")}, fields_of(config)
    numbers = ((flags[name], value) for name, value in values.items() if name in flags and type(value) in (int, float))
    found = ((flag.name, value, number_rule(flag, value)) for flag, value in numbers)
    broken = [f"{name} {value:g} {rule[0]}" for name, value, rule in found if rule is not None]
    return broken or [f"{each.flag} {each.value} {each.rule}" for each in expert_groups(config)]


def _of_single_layers(hf: Mapping[str, Any], family: Family, config: TransformerConfig) -> Iterator[str]:
    """Settings of single layers, which some classes write beside the keys that they follow from, must be those that the
    family's own keys give."""
    given = hf.get(LAYER_BY_LAYER) or {}
    if not isinstance(given, Mapping) or not all(isinstance(own, Mapping) for own in given.values()):
        yield f"{LAYER_BY_LAYER} = {str(given)[:80]} must be settings by layer"
        return
    read = {
        number: {key: getattr(config.of_layer(int(number)), family.keys.get(key, key), None) for key in own}
        for number, own in given.items()
        if str(number).isdecimal() and int(number) < config.num_layers
    }
    if read != given:
        yield f"{LAYER_BY_LAYER} = {str(given)[:80]}, supported: none, as it changes settings of layers"


def _problems(hf: Mapping[str, Any], family: Family) -> Iterator[str]:
    for key, legal in (*family.only.items(), *family.values.items()):
        if hf[key] not in legal:
            part = missing_part("settings", key)
            needed = f"; another value needs {part}" if part else ""
            yield f"{key} = {hf[key]!r}, supported: {' or '.join(map(repr, legal))}{needed}"
    if (quantization := hf.get("quantization_config")) is not None:
        method = quantization.get("quant_method")
        if method not in family.quantized:
            known = f"; {' and '.join(family.quantized)} is" if family.quantized else ""
            yield f"quantization_config is given; weights quantized by {method} are not supported{known}"
    if "attention_types" in family.defaults and "attention_layers" in hf and not _is_derived("attention_layers", hf):
        yield "attention_layers differs from attention_types"
    for key, other in family.equal.items():
        if hf.get(key) not in (None, hf[other]):
            yield f"{key} = {hf[key]!r} differs from {other} = {hf[other]!r}"
    classes = dict.fromkeys(sections()[flag.section] for flag in flags_of("model"))
    hints = {name: hint for cls in classes for name, hint in get_type_hints(cls).items()}
    for key, ours in family.keys.items():
        if ours not in hints:
            yield f"{key} needs the extension {home_of(dashed(ours))}, which is not installed"
        elif key not in hf:
            yield f"{key} is missing"
        elif ours == "num_experts" and family.width_without_experts and hf[key] == 0:
            continue
        elif key not in family.values and (rule := broken_rule(hf[key], hints[ours])):
            yield f"{key} = {hf[key]!r} must be {rule}"
    yield from _problems_of_experts(hf, family)
    if type(hf["tie_word_embeddings"]) is not bool:
        yield f"tie_word_embeddings = {hf['tie_word_embeddings']!r} must be true or false"


def _problems_of_experts(hf: Mapping[str, Any], family: Family) -> Iterator[str]:
    """DeepSeek's routing where ours differs from it."""
    if "n_shared_experts" in family.defaults and (rule := broken_rule(hf["n_shared_experts"], int)):
        yield f"n_shared_experts = {hf['n_shared_experts']!r} must be {rule}"
    if "first_k_dense_replace" in family.defaults and not hf.get("mlp_layer_types"):
        first, layers = hf["first_k_dense_replace"], hf.get("num_hidden_layers")
        if type(first) is not int or type(layers) is not int or first < 0:
            yield f"first_k_dense_replace = {first!r} must be a whole number, at least 0"
    of_topk = next((key for key, ours in family.keys.items() if ours == "moe_router_topk"), "")
    normalized = "norm_topk_prob" not in family.keys or hf["norm_topk_prob"]
    own_scores = family.fixed.get("moe_router_score_function") == "sigmoid" and of_topk not in family.only
    if (own_scores or "scoring_func" in family.values) and normalized and hf.get(of_topk) == 1:
        yield f"{of_topk} = 1 with norm_topk_prob; supported: 2 or more"
    if hf.get("moe_layer_end_index", -1) != -1 and hf["moe_layer_end_index"] != hf.get("num_hidden_layers", 0) - 1:
        yield f"moe_layer_end_index = {hf['moe_layer_end_index']!r}, supported: the last layer"


def _config(hf: Mapping[str, Any], family: Family) -> TransformerConfig:
    given: dict[str, Any] = {key: tuple(hf[key]) if isinstance(hf[key], list) else hf[key] for key in family.keys}
    fields = {ours: family.values.get(key, {}).get(given[key], given[key]) for key, ours in family.keys.items()}
    fields |= {ours: product_of(hf, powers) for ours, powers in family.powers.items() if fields.get(ours) is None}
    fields |= {ours: fields[other] for ours, other in family.same.items()}
    fields |= family.fixed
    fields["num_layers"] *= family.layers_each
    fields["seq_length"] = fields["max_position_embeddings"]
    fields["untie_embeddings_and_output_weights"] = not hf["tie_word_embeddings"]
    if fields.get("num_query_groups") == fields["num_attention_heads"]:
        fields["num_query_groups"] = None
    fields["group_query_attention"] = fields.get("num_query_groups") is not None
    if fields.get("num_experts") == 0:
        width = {"ffn_hidden_size": fields["moe_shared_expert_intermediate_size"]}
        fields |= {"num_experts": None, "moe_shared_expert_intermediate_size": None, **width}
    if hf.get("block_auto_adjust_ff_dim") and "block_auto_adjust_ff_dim" in family.defaults:
        fields["ffn_hidden_size"] = _adjusted_width(hf, fields["ffn_hidden_size"])
    if "n_group" in family.keys and hf["n_group"] != 1 and fields["moe_router_topk"] != 2 * hf["topk_group"]:
        fields["moe_router_group_score_topk"] = 2
    if "first_k_dense_replace" in hf:
        fields["moe_layer_freq"] = _experts_from_hf(hf, family)
    if "mlp_only_layers" in family.defaults:
        dense, step = hf["mlp_only_layers"] or (), hf["decoder_sparse_step"]
        check_count("decoder_sparse_step", step)
        experts = [layer not in dense and not (layer + 1) % step for layer in range(hf["num_hidden_layers"])]
        fields["moe_layer_freq"] = pattern_text(experts, usual=True) or "1"
    if fields["position_embedding_type"] is None:
        bases = hf.get("rope_parameters") or {}
        fields["position_embedding_type"] = "none" if bases.get("rope_theta", 0) is None else "rope"
    if fields["position_embedding_type"] == "rope" and "compress_rates" not in family.defaults:
        fields |= rotary_from_hf(hf, family)
    if "layer_rope_theta" in family.defaults and hf["layer_rope_theta"]:
        fields |= bases_from_hf(hf, family)
    if "num_attention_heads_per_layer" in family.defaults and hf["num_attention_heads_per_layer"]:
        full, local = by_kind(hf, family, "num_attention_heads_per_layer")
        fields |= {"num_attention_heads": full or local, "window_num_attention_heads": local}
    if "topk_method" in family.only and hf["topk_method"] != "greedy":
        fields |= _groups_from_hf(hf)
    if "compress_rates" in family.defaults:
        fields |= _compressed_from_hf(hf)
    if "no_rope_layers" in family.defaults:
        fields["no_rope_freq"] = pattern_text([not rotated for rotated in rotated_layers(hf)], usual=False)
    if family.rotary_layers != "all" and hf.get("sliding_window"):
        fields["no_rope_freq"] = pattern_text([not local for local in windows(hf, family)], usual=False)
    elif family.rotary_layers == "windows":
        raise ValueError(f"config.json: sliding_window = {hf.get('sliding_window')!r} is not supported")
    if "full_attention_interval" in family.defaults:
        fields["linear_attention_freq"] = pattern_text(linear_layers(hf, family), usual=True)
    if "block_types" in family.defaults:
        kinds = [each for each, _ in zip(cycle(hf["block_types"]), range(fields["num_layers"]), strict=False)]
        listed = listed_layers({**hf, "block_types": kinds}, "block_types", ("attention", "recurrent"))
        fields["linear_attention_freq"] = pattern_text(listed, usual=True)
        fields["embedding_multiplier"] = _in_bf16(math.sqrt(fields["hidden_size"]))
        fields["ffn_hidden_size"] //= 2
    if "attn_layer_period" in family.defaults:
        attention, experts = (periodic(hf, of) for of in ("attn", "expert"))
        fields["linear_attention_freq"] = pattern_text([not attends for attends in attention], usual=True)
        fields["moe_layer_freq"] = pattern_text(experts, usual=True) or "1"
        fields["num_experts"] = None if fields["num_experts"] == 1 or not any(experts) else fields["num_experts"]
    if "hybrid_layer_pattern" in family.fixed:
        fields["hybrid_layer_pattern"] *= fields["num_layers"]
    if "hybrid_override_pattern" in family.keys:
        absent = [parts for letter, parts in FIELDS_OF.items() if letter not in fields["hybrid_layer_pattern"]]
        fields = {name: value for name, value in fields.items() if not name.startswith(tuple(chain(*absent)))}
    if "indexer_types" in family.defaults:
        fields |= selections_from_hf(hf)
    if "attention_chunk_size" in family.defaults:
        fields |= chunks_from_hf(hf)
    if "attn_temperature_tuning" in family.defaults:
        fields["attention_temperature_coeff"] = float(hf["attn_scale"]) if hf["attn_temperature_tuning"] else 0.0
    if "moe_layers" in family.defaults:
        fields["moe_layer_freq"] = moe_layers_from_hf(hf)
    if "window_size" not in family.fixed and family.keys.get("attention_window_size") != "window_size":
        fields |= window_from_hf(hf, family)
    if family.window_groups > 1 and fields.get("window_size"):
        groups = fields["num_query_groups"] or fields["num_attention_heads"]
        fields["window_num_query_groups"] = groups * family.window_groups
    return with_fields(TransformerConfig(), fields)


def _in_bf16(value: float) -> float:
    """The nearest number in bf16, in which RecurrentGemma keeps the factor of embeddings."""
    (bits,) = struct.unpack("I", struct.pack("f", value))
    return struct.unpack("f", struct.pack("I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0]


def _adjusted_width(hf: Mapping[str, Any], width: int) -> int:
    """The width of the MLPs of LFM2: two thirds of that given, times a factor, up to the next multiple."""
    width = int(2 * width / 3)
    factor = hf["block_ffn_dim_multiplier"]
    multiple = hf["block_multiple_of"]
    return width if factor is None else math.ceil(int(factor * width) / multiple) * multiple


def product_of(hf: Mapping[str, Any], powers: Mapping[str, float]) -> float | None:
    """The product of powers of values of keys; None if one of them is not given."""
    if any(hf[key] is None for key in powers):
        return None
    return math.prod(1 / math.sqrt(hf[key]) if power == -0.5 else hf[key] ** power for key, power in powers.items())


def fields_of(config: TransformerConfig) -> dict[str, Any]:
    """All fields of a model's configuration, those that extensions define included."""
    run = run_of(config)
    own = {each.name: getattr(config, each.name) for each in fields(config)}
    return own | {flag.field: value_of(run, flag) for flag in flags_of("model")}


def _experts_from_hf(hf: Mapping[str, Any], family: Family) -> str:
    """--moe-layer-freq: by a list of all layers if there is one, else all but the first layers have experts, or
    each N-th of these."""
    dense, layers = hf["first_k_dense_replace"], hf["num_hidden_layers"]
    if not hf.get("mlp_layer_types") and hf.get("moe_layer_freq", 1) != 1 and "moe_layer_freq" in family.defaults:
        check_count("moe_layer_freq", hf["moe_layer_freq"])
        experts = [layer >= dense and not layer % hf["moe_layer_freq"] for layer in range(layers)]
        return pattern_text(experts, usual=True) or "1"
    if not hf.get("mlp_layer_types"):
        return f"([0]*{dense}+[1]*{layers - dense})" if 0 < dense < layers else str([0] * layers) if dense else "1"
    return pattern_text(listed_layers(hf, "mlp_layer_types", ("dense", "sparse")), usual=True) or "1"


def _compressed_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of DeepSeek-V4: tokens of compressed keys, routing by hashes, rotated channels, and both rotary bases."""
    layers, rates = hf["num_hidden_layers"], {**(hf["compress_rates"] or {SELECTED: 4, COMPRESSED: 128})}
    single = {SELECTED: hf.get("compress_rate_csa"), COMPRESSED: hf.get("compress_rate_hca")}
    rates |= {kind: rate for kind, rate in single.items() if rate is not None}
    ratios = {LOCAL: 0, **rates}
    usual = [COMPRESSED if layer < 2 or layer % 2 == 0 else SELECTED for layer in range(layers)]
    older = hf.get("compress_ratios") or ()
    if unknown := {*older} - KIND_OF_RATIO.keys():
        raise ValueError(f"config.json: compress_ratios has {sorted(unknown)}, supported: 0, 4 and 128")
    kinds = hf["layer_types"] or [KIND_OF_RATIO[ratio] for ratio in older] or usual
    found = [ratios[kind] for kind in kinds[:layers]]
    if rates[SELECTED] != 4 or rates[COMPRESSED] in (0, 4) or len(found) != layers:
        raise ValueError(f"config.json: compress_rates = {rates} of {len(found)} layers are not supported; CSA has 4")
    hashed = [kind == "hash_moe" for kind in hf["mlp_layer_types"] or ()]
    first = sum(hashed) if hf["mlp_layer_types"] else min(hf.get("num_hash_layers", 3), layers)
    if any(hashed[first:]):
        raise ValueError("config.json: mlp_layer_types has hash_moe behind moe, which is not supported")
    counted = hf.get("qk_rope_head_dim")
    usual_percent = 0.125 if counted is None else counted / hf["head_dim"]
    rotary = int(hf["head_dim"] * (hf.get("partial_rotary_factor") or usual_percent))
    if rotary < 2 or rotary % 2 or hf["num_attention_heads"] % hf["o_groups"]:
        sizes = f"{rotary} rotated channels and o_groups = {hf['o_groups']} of {hf['num_attention_heads']} heads"
        raise ValueError(f"config.json: {sizes} are not supported; use an even number, and a divisor")
    fields = {"qk_head_dim": hf["head_dim"] - rotary, "qk_pos_emb_head_dim": rotary, "rotary_percent": 1.0}
    both = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not (both.get("main") and both.get("compress")):
        both = {"main": {}, "compress": {**both, "rope_theta": hf["compress_rope_theta"]}}
    main, scaled = both["main"], both["compress"]
    kind = scaled.get("rope_type", scaled.get("type", "default"))
    if main.get("rope_type", "default") != "default" or kind not in ("default", "yarn"):
        raise ValueError("config.json: rope_parameters other than those of DeepSeek-V4 are not supported")
    if kind == "yarn":
        if scaled.get("attention_factor", 1.0) != 1.0:
            raise ValueError("config.json: YaRN with an attention_factor other than 1 is not supported")
        fields |= {"rope_type": "yarn", **yarn_from_hf({**scaled, "attention_factor": None, "mscale": None}, hf)}
    return fields | {
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
        "rotary_base": float(main.get("rope_theta", hf["rope_theta"])),
        "csa_compress_rotary_base": float(scaled.get("rope_theta", hf["compress_rope_theta"])),
        "csa_compress_ratios": str(found),
        **({"moe_n_hash_layers": first} if first else {}),
    }


def _groups_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Groups of experts, of which the best ones are those of the largest score (DeepSeek-V2)."""
    for key in ("n_group", "topk_group"):
        check_count(key, hf.get(key))
    fields = {"moe_router_num_groups": hf["n_group"], "moe_router_group_topk": hf["topk_group"]}
    return fields | {"moe_router_group_score_topk": 1}
