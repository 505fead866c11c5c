"""Conversion of DeepSeek-V4's layer settings in config.json: layer kinds, hash routing, and two rotary embeddings.

This module does not import torch.
"""

from __future__ import annotations

from megatron.core.config.layers import layer_numbers
from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import (
    Fields,
    Values,
    entries,
    number,
    table,
    whole,
)
from megatron.extensions.interop.hugging_face.config_json.read_layers import LOCAL
from megatron.extensions.interop.hugging_face.config_json.read_rotary import yarn_from_hf

SELECTED, COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
"""Kinds of DeepSeek-V4 layers. SELECTED layers attend to a selection of the compressed keys, and COMPRESSED layers
attend to all compressed keys."""

KIND_OF_RATIO: dict[object, str] = {0: LOCAL, 4: SELECTED, 128: COMPRESSED}
"""Maps entries of `compress_ratios` in older files to layer kinds."""


def compressed_from_hf(hf: Values) -> Fields:
    """Return the TransformerConfig fields for the layers' compression ratios, the hash-routed layers, the rotated
    channels, and the two rotary bases."""
    fields: Fields = {"csa_compress_ratios": str(_ratios(hf))}
    if hashed := _hashed_layers(hf):
        fields["moe_n_hash_layers"] = hashed
    return fields | _rotated_channels(hf) | _both_rotary(hf)


def _ratios(hf: Values) -> list[object]:
    """Return the number of tokens per compressed key for each layer. The number is 0 for layers without compressed
    keys."""
    layers = whole(hf, "num_hidden_layers")
    rates = table(hf, "compress_rates") or {SELECTED: 4, COMPRESSED: 128}
    older = {SELECTED: hf.get("compress_rate_csa"), COMPRESSED: hf.get("compress_rate_hca")}
    rates = rates | {kind: rate for kind, rate in older.items() if rate is not None}
    ratio_of: dict[object, object] = {LOCAL: 0}
    ratio_of.update(rates.items())
    found = [ratio_of[kind] for kind in _kinds(hf)[:layers]]
    if rates[SELECTED] != 4 or rates[COMPRESSED] in (0, 4) or len(found) != layers:
        rule = f"is not supported; {SELECTED} must have rate 4"
        raise ValueError(f"config.json: compress_rates = {rates} for {len(found)} layers {rule}")
    return found


def _kinds(hf: Values) -> list[object]:
    """Return the attention kind of each layer. Newer config.json files list the kinds in layer_types, and older files
    list ratios in compress_ratios. If config.json lacks both keys, return the default kinds of the transformers
    class."""
    older = entries(hf, "compress_ratios")
    if unknown := [ratio for ratio in {*older} if ratio not in KIND_OF_RATIO]:
        raise ValueError(f"config.json: compress_ratios has {sorted(unknown, key=str)}, supported: 0, 4 and 128")
    usual = [COMPRESSED if layer < 2 or layer % 2 == 0 else SELECTED for layer in range(whole(hf, "num_hidden_layers"))]
    return entries(hf, "layer_types") or [KIND_OF_RATIO[ratio] for ratio in older] or [*usual]


def _hashed_layers(hf: Values) -> int:
    """Return the number of layers with hash routing. Raises ValueError if these layers are not the first layers of the
    model."""
    if not hf["mlp_layer_types"]:
        usual = whole(hf, "num_hash_layers") if "num_hash_layers" in hf else 3
        return min(usual, whole(hf, "num_hidden_layers"))
    hashed = [kind == "hash_moe" for kind in entries(hf, "mlp_layer_types")]
    if any(hashed[sum(hashed) :]):
        rule = "contains hash_moe after another kind; hash_moe is supported only for the first layers"
        raise ValueError(f"config.json: mlp_layer_types {rule}")
    return sum(hashed)


def _rotated_channels(hf: Values) -> Fields:
    """Return the TransformerConfig fields for the numbers of unrotated and rotated channels per head. In this program's
    model, the query and key of a head are the concatenation of a vector without rotary embedding and a vector to which
    the rotary embedding is fully applied."""
    width = whole(hf, "head_dim")
    percent = 0.125 if hf.get("qk_rope_head_dim") is None else number(hf, "qk_rope_head_dim") / width
    if hf.get("partial_rotary_factor"):
        percent = number(hf, "partial_rotary_factor")
    rotary = int(width * percent)
    heads, groups = whole(hf, "num_attention_heads"), whole(hf, "o_groups")
    if rotary < 2 or rotary % 2 or heads % groups:
        sizes = f"{rotary} rotated channels and o_groups = {groups} for {heads} heads"
        remedy = "use an even number of channels, and an o_groups that divides the number of heads"
        raise ValueError(f"config.json: {sizes} are not supported; {remedy}")
    return {"qk_head_dim": width - rotary, "qk_pos_emb_head_dim": rotary, "rotary_percent": 1.0}


def _both_rotary(hf: Values) -> Fields:
    """Return the TransformerConfig fields for the rotary embeddings of ordinary keys and of compressed keys. Context
    scaling is supported only for the rotary embedding of compressed keys."""
    both = table(hf, "rope_scaling") or table(hf, "rope_parameters")
    main, scaled = table(both, "main"), table(both, "compress")
    if not (main and scaled):
        main, scaled = {}, {**both, "rope_theta": hf["compress_rope_theta"]}
    kind = scaled.get("rope_type", scaled.get("type", "default"))
    if main.get("rope_type", "default") != "default" or kind not in ("default", "yarn"):
        raise ValueError("config.json: rope_parameters other than those of DeepSeek-V4 are not supported")
    fields: Fields = {}
    if kind == "yarn":
        if scaled.get("attention_factor", 1.0) != 1.0:
            raise ValueError("config.json: YaRN with an attention_factor other than 1 is not supported")
        fields |= {"rope_type": "yarn", **yarn_from_hf({**scaled, "attention_factor": None, "mscale": None}, hf)}
    bases = {"main": hf["rope_theta"], "compress": hf["compress_rope_theta"]}
    bases |= {name: each["rope_theta"] for name, each in (("main", main), ("compress", scaled)) if "rope_theta" in each}
    return fields | {
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
        "rotary_base": float(number(bases, "main")),
        "csa_compress_rotary_base": float(number(bases, "compress")),
    }


def compressed_to_hf(config: TransformerConfig, stated: Values, scaling: Values) -> Fields:
    """Return the config.json keys for the layers of a model with compressed attention. The model may have at most one
    compression ratio other than 0 and 4. `scaling` contains the keys for context scaling of the compressed keys' rotary
    embedding.
    """
    layers, given = config.num_layers, stated["csa_compress_ratios"]
    ratios = layer_numbers(given if isinstance(given, str) else "", layers, least=0)
    heavy = next((ratio for ratio in ratios if ratio not in (0, 4)), 128)
    kinds, hashed = {0: LOCAL, 4: SELECTED}, number({"moe_n_hash_layers": 0, **stated}, "moe_n_hash_layers")
    percent = whole(stated, "qk_pos_emb_head_dim") / whole(stated, "v_head_dim")
    base = stated["csa_compress_rotary_base"]
    main = {"rope_type": "default", "rope_theta": config.rotary_base, "partial_rotary_factor": percent}
    scaled = {**scaling, "rope_theta": base, "partial_rotary_factor": percent}
    if scaling.get("rope_type") == "yarn":
        scaled["attention_factor"] = 1.0
    return {
        "layer_types": [kinds.get(ratio, COMPRESSED) for ratio in ratios],
        "compress_rates": {SELECTED: 4, COMPRESSED: heavy},
        "mlp_layer_types": ["hash_moe" if layer < hashed else "moe" for layer in range(layers)],
        "partial_rotary_factor": percent,
        "compress_rope_theta": base,
        "rope_parameters": {"main": main, "compress": scaled},
    }
