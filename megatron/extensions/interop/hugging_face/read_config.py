"""Conversion of Hugging Face's config.json to a model configuration. The conversion follows the tables of the model's
family, whose format `families` defines. This module does not import torch.

All functions except `read_json` are pure. An unsupported setting raises an error and is never replaced by a similar
setting. A config.json may be untrusted. A wrong type or an impossible value raises ValueError with a one-line message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import get_type_hints

from megatron.core.config.json_text import parse_json
from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import (
    Fields,
    Values,
    entries,
    number,
    table,
    whole,
)
from megatron.extensions.interop.hugging_face.config_json.read_layers import (
    broken_rule,
    pattern_from_hf,
    pattern_text,
    repeated,
    window_from_hf,
    windows,
)
from megatron.extensions.interop.hugging_face.config_json.read_rotary import rotary_from_hf
from megatron.extensions.interop.hugging_face.families import (
    FAMILIES,
    Family,
    by_precedence,
    derived_values,
    inner_values,
    usual_names,
    usual_values,
)
from megatron.extensions.interop.hugging_face.family_files import common_keys, missing_part
from megatron.training.config.flags import dashed, flags_of, home_of, run_of, sections, value_of, with_fields
from megatron.training.config.rules.fields import number_rule
from megatron.training.config.rules.moe import expert_groups

MULTIMODAL = {
    "llama4": "language_model.",
    "gemma4": "model.language_model.",
    "gemma4_unified": "model.language_model.",
}
"""Maps the model_type of a multimodal model to the prefix of its text model's tensor names."""


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a file. Raises ValueError if the file does not contain a JSON object."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must contain a JSON object, not a {type(value).__name__}")
    return value


def text_model(hf_config: Values) -> tuple[dict[str, object], str]:
    """Return the configuration of the text model in a config.json, and the prefix of the names of the text model's
    weights.

    If the model is multimodal, its configuration contains the configuration of the text model. The function returns
    this inner configuration. If the model is not multimodal, its configuration is returned unchanged. Raises ValueError
    if the configuration of the text model is missing.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MULTIMODAL:
        return dict(hf_config), ""
    found = hf_config.get("text_config")
    if not isinstance(found, dict):
        raise ValueError(f"config.json: text_config of model_type {model_type} must be an object")
    shared = {key: hf_config[key] for key in ("tie_word_embeddings", "quantization_config") if key in hf_config}
    return {"model_type": f"{model_type}_text", **shared, **found}, MULTIMODAL[model_type]


def family_of(hf_config: Values) -> Family:
    """Return the family of a config.json. Raises ValueError for an unknown family."""
    model_type = hf_config.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return FAMILIES[model_type]
    if missing := missing_part("families", model_type):
        raise ValueError(f"config.json: model_type {model_type!r} is not supported: it needs {missing}")
    known = f"supported: {', '.join(FAMILIES)}; --hf-family FILE adds a family"
    raise ValueError(f"config.json: model_type {model_type!r} is not supported; {known}")


LAYER_BY_LAYER = "per_layer_config"
"""Key of config.json that overrides other keys for individual layers. Every family supports `LAYER_BY_LAYER`."""

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
"""Keys of config.json that are known for every family, so that the tables of a family need not contain them. Some of
the keys do not describe the model. The other keys are read in the same way for all families."""


OLDER = ("compress_ratios", "compress_rate_csa", "compress_rate_hca", "num_hash_layers", "qk_rope_head_dim")
"""Keys that occur only in older config.json files of families that now use the key `compress_rates`."""


WRITTEN: Mapping[str, Callable[[Values], object]] = {
    "qk_head_dim": lambda hf: number(hf, "qk_nope_head_dim") + number(hf, "qk_rope_head_dim"),
    "head_dim": lambda hf: hf["qk_rope_head_dim"],
    "sliding_window": lambda hf: whole(hf, "local_attention") // 2,
    "_sliding_window_pattern": lambda hf: hf.get("sliding_window_pattern", 6),
    "num_key_value_heads": lambda hf: 1 if hf["multi_query"] else hf["n_head"],
    "attention_layers": lambda hf: repeated(entries(hf, "attention_types"), len(entries(hf, "attention_layers")) + 1),
    "final_w_init_variance_scale": lambda hf: 2 / number(hf, "num_hidden_layers"),
}
"""Keys that some transformers classes write but never read. Each of these keys is mapped to a function that computes
its value from other keys."""


def unread_keys(hf_config: Values) -> Iterator[str]:
    """Yield a notice about config.json keys that are ignored. A key is ignored if neither the family nor its
    transformers class uses it. Keys that a transformers class computes from other keys are mentioned only if their
    values differ from the computed values.
    """
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


def _is_derived(key: str, whole: Values) -> bool:
    """Return True if the value of a key equals the value that the transformers class derives from other keys."""
    if key == LAYER_BY_LAYER:
        return not whole[key]
    try:
        return key in WRITTEN and bool(WRITTEN[key](whole) == whole[key])
    except (TypeError, LookupError, ArithmeticError, ValueError):
        return False


def config_from_hf(hf_config: Values) -> TransformerConfig:
    """Convert a config.json to a model configuration. In the returned configuration, seq_length is the model's maximum
    context length.

    Raises ValueError with a list of all unsupported settings.
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
            problems = [f"1 of {config.head_dim} channels of a head is rotated, but channels are rotated in pairs"]
    except KeyError as error:
        problems = [f"{error.args[0]} is missing"]
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        problems = [f"a value has the wrong type or is missing ({type(error).__name__}: {error})"]
    if problems or config is None:
        raise ValueError(f"config.json of model_type {family.model_type}: " + "; ".join(problems))
    return config


def _out_of_bounds(config: TransformerConfig) -> list[str]:
    """Return an error message for each field whose value is outside the bounds of its flag, and for invalid expert
    groups."""
    if config.head_dim < 1:
        return [f"a head has no channels: hidden_size {config.hidden_size} for {config.num_attention_heads} heads"]
    flags, values = {flag.field: flag for flag in flags_of("model")}, fields_of(config)
    broken = []
    for name, value in values.items():
        if name in flags and isinstance(value, (int, float)) and not isinstance(value, bool):
            rule = number_rule(flags[name], value)
            broken += [f"{flags[name].name} {value:g} {rule[0]}"] if rule is not None else []
    return broken or [f"{each.flag} {each.value} {each.rule}" for each in expert_groups(config)]


def _of_single_layers(hf: Values, family: Family, config: TransformerConfig) -> Iterator[str]:
    """Yield an error message for each setting of an individual layer that contradicts the settings of the whole model.
    Some transformers classes write both kinds of settings to config.json."""
    given = hf.get(LAYER_BY_LAYER) or {}
    layers = {number: own for number, own in given.items() if isinstance(own, dict)} if isinstance(given, dict) else {}
    if not isinstance(given, dict) or len(layers) < len(given):
        yield f"{LAYER_BY_LAYER} = {str(given)[:80]} must be an object that maps layers to settings"
        return
    read = {
        number: {key: _in_layer(config.of_layer(int(number)), family.keys.get(key, key)) for key in own}
        for number, own in layers.items()
        if str(number).isdecimal() and int(number) < config.num_layers
    }
    if read != given:
        yield f"{LAYER_BY_LAYER} = {str(given)[:80]}, which changes settings of individual layers, is not supported"


def _in_layer(own: TransformerConfig, name: str) -> object:
    """Return the value of the field `name` in the configuration of one layer."""
    return own.query_groups if name == "num_query_groups" else getattr(own, name, None)


def _problems(hf: Values, family: Family) -> Iterator[str]:
    for key, legal in (*family.only.items(), *family.values.items()):
        if hf[key] not in legal:
            part = missing_part("settings", key)
            needed = f"; another value needs {part}" if part else ""
            yield f"{key} = {hf[key]!r}, supported: {' or '.join(map(repr, legal))}{needed}"
    if (quantization := hf.get("quantization_config")) is not None:
        method = table({"": quantization}, "").get("quant_method")
        if method not in family.quantized:
            known = f"; {' and '.join(family.quantized)} is" if family.quantized else ""
            yield f"quantization_config: weights quantized by {method} are not supported{known}"
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


def _problems_of_experts(hf: Values, family: Family) -> Iterator[str]:
    """Yield an error message for each unsupported setting of expert routing."""
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
    if hf.get("moe_layer_end_index", -1) != -1 and hf["moe_layer_end_index"] != whole(hf, "num_hidden_layers") - 1:
        yield f"moe_layer_end_index = {hf['moe_layer_end_index']!r} is not supported; it must be the last layer"


def _config(hf: Values, family: Family) -> TransformerConfig:
    fields = _of_tables(hf, family)
    fields["position_embedding_type"] = fields["position_embedding_type"] or _positions(hf)
    if fields["position_embedding_type"] == "rope" and not family.rotary_by_adapter:
        fields |= rotary_from_hf(hf, family)
    for adapter in family.adapters:
        fields = adapter.read(fields, hf, family)
    if family.rotary_layers != "all" and hf.get("sliding_window"):
        fields["no_rope_freq"] = pattern_text([not local for local in windows(hf, family)], usual=False)
    elif family.rotary_layers == "windows":
        raise ValueError(f"config.json: sliding_window = {hf.get('sliding_window')!r} is not supported")
    if "window_size" not in family.fixed and family.keys.get("attention_window_size") != "window_size":
        fields |= window_from_hf(hf, family)
    if family.window_groups > 1 and fields.get("window_size"):
        every = "num_query_groups" if fields["num_query_groups"] else "num_attention_heads"
        fields["window_num_query_groups"] = whole(fields, every) * family.window_groups
    return with_fields(TransformerConfig(), fields)


def _of_tables(hf: Values, family: Family) -> Fields:
    """Return the TransformerConfig fields that the tables of a family determine."""
    fields: Fields = {ours: _our_value(hf[key], family.values.get(key, {})) for key, ours in family.keys.items()}
    fields |= {ours: product_of(hf, powers) for ours, powers in family.powers.items() if fields.get(ours) is None}
    fields |= {ours: fields[other] for ours, other in family.same.items()}
    fields |= family.fixed
    fields["num_layers"] = whole(fields, "num_layers") * family.layers_each
    fields["seq_length"] = fields["max_position_embeddings"]
    fields["untie_embeddings_and_output_weights"] = not hf["tie_word_embeddings"]
    if fields.get("num_query_groups") == fields["num_attention_heads"]:
        fields["num_query_groups"] = None
    fields["group_query_attention"] = fields.get("num_query_groups") is not None
    if fields.get("num_experts") == 0:
        width = fields["moe_shared_expert_intermediate_size"]
        fields |= {"num_experts": None, "moe_shared_expert_intermediate_size": None, "ffn_hidden_size": width}
    return fields


def _our_value(value: object, values: Mapping[object, object]) -> object:
    """Convert the value of a config.json key to the value of the TransformerConfig field. `values` maps config.json
    values to field values. A value that is not in `values` is returned unchanged."""
    value = tuple(value) if isinstance(value, list) else value
    return values.get(value, value)


def _positions(hf: Values) -> str:
    """Return the position embedding type for families in which a model may lack a position embedding."""
    return "none" if table(hf, "rope_parameters").get("rope_theta", 0) is None else "rope"


def product_of(hf: Values, powers: Mapping[str, float]) -> float | None:
    """Return the product of the values of the keys in `powers`, each raised to its power. Return None if a value is
    null."""
    if any(hf[key] is None for key in powers):
        return None
    return math.prod(_power(number(hf, key), power) for key, power in powers.items())


def _power(value: float, power: float) -> float:
    """Return `value` to the power `power`. For a power of -0.5, divide 1 by the square root, so that the result is
    rounded in the same way as in the transformers classes."""
    return float(1 / math.sqrt(value)) if power == -0.5 else value**power


def fields_of(config: TransformerConfig) -> Fields:
    """Return all fields of a model's configuration, including fields of extensions."""
    run = run_of(config)
    own = {each.name: getattr(config, each.name) for each in fields(config)}
    return own | {flag.field: value_of(run, flag) for flag in flags_of("model")}
