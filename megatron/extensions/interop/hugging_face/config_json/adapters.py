"""Adapters for config.json keys that a family's tables cannot translate. The file of a family lists its adapters under
"adapters". This module does not import torch.

`read` receives two dicts: the TransformerConfig fields that the family's tables provide, and the values of config.json
under the family's names. `read` returns these fields together with the fields that it computes from the adapter's own
keys. `read` raises ValueError for unsupported values. `write` receives the config.json keys from the tables, adds the
adapter's own keys, and returns all of them. Adapters are called in the order in which the family file lists them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from itertools import cycle, islice

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.compressed_layers import compressed_from_hf, compressed_to_hf
from megatron.extensions.interop.hugging_face.config_json.config_values import (
    Fields,
    Values,
    entries,
    number,
    table,
    text,
    whole,
)
from megatron.extensions.interop.hugging_face.config_json.gemma4 import (
    LayersWithoutKeys,
    SizeOfLayerEmbeddings,
    WidthsOfGlobalHeads,
)
from megatron.extensions.interop.hugging_face.config_json.kinds_of_layers import (
    ConvolutionsAndWindows,
    HalvesOfWindows,
    KimiHeadsOfModel,
    RotaryOfKinds,
    WithoutLogitScale,
)
from megatron.extensions.interop.hugging_face.config_json.mean_of_experts import MeanOfExperts
from megatron.extensions.interop.hugging_face.config_json.read_layers import (
    CHUNKED,
    FULL,
    chunks_from_hf,
    count,
    linear_layers,
    listed_layers,
    moe_layers_from_hf,
    pattern_text,
    periodic,
    rotated_layers,
    selecting,
    selections_from_hf,
)
from megatron.extensions.interop.hugging_face.config_json.read_rotary import bases_from_hf, by_kind
from megatron.extensions.interop.hugging_face.families import Adapter, Family
from megatron.extensions.layers.hybrid_layers.flags import EXPERTS

FIELDS_OF = {"M": ("mamba_",), EXPERTS: ("moe_", "num_experts")}
"""Maps a letter of --hybrid-layer-pattern to prefixes of field names. Only layers with this letter use the fields with
these prefixes."""


class GroupsByTwoExperts(Adapter):
    """Adapter for DeepSeek-V3's expert groups. The score of a group of experts is the sum of the two highest scores of
    experts in the group."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        if hf["n_group"] in (None, 1) or fields["moe_router_topk"] == 2 * whole(hf, "topk_group"):
            return fields
        return fields | {"moe_router_group_score_topk": 2}


class GroupsByBestExpert(Adapter):
    """Adapter for DeepSeek-V2's expert groups. The score of a group of experts is the highest score of an expert in the
    group."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        if hf["topk_method"] == "greedy":
            return fields
        groups = {"moe_router_num_groups": count(hf, "n_group"), "moe_router_group_topk": count(hf, "topk_group")}
        return fields | groups | {"moe_router_group_score_topk": 1}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        if (config.moe_router_num_groups or 1) == 1:
            return hf
        groups = {"n_group": config.moe_router_num_groups, "topk_group": config.moe_router_group_topk}
        return hf | {"topk_method": "group_limited_greedy", **groups}


class FirstLayersDense(Adapter):
    """Adapter for models whose first layers are dense. A config.json either lists the kinds of all layers, or contains
    the number of dense layers and, in some families, an interval N. After the dense layers, the layers whose number is
    a multiple of N are MoE layers; without an interval, all remaining layers are MoE layers."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        if hf.get("mlp_layer_types"):
            listed = listed_layers(hf, "mlp_layer_types", ("dense", "sparse"))
            return fields | {"moe_layer_freq": pattern_text(listed, usual=True) or "1"}
        dense, layers = whole(hf, "first_k_dense_replace"), whole(hf, "num_hidden_layers")
        if "moe_layer_freq" in family.defaults and hf["moe_layer_freq"] != 1:
            step = count(hf, "moe_layer_freq")
            pattern = pattern_text([layer >= dense and not layer % step for layer in range(layers)], usual=True)
        elif 0 < dense < layers:
            pattern = f"([0]*{dense}+[1]*{layers - dense})"
        else:
            pattern = str([0] * layers) if dense else "1"
        return fields | {"moe_layer_freq": pattern or "1"}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        hf = hf | {"first_k_dense_replace": config.moe_layers[0] if config.moe_layers else config.num_layers}
        if "mlp_layer_types" in family.defaults:
            hf["mlp_layer_types"] = ["sparse" if experts else "dense" for experts in config.expert_pattern]
        return hf


class ListedLayersDense(Adapter):
    """Adapter for the MoE layers of Qwen's models. Every N-th layer is an MoE layer, except the layers in
    `mlp_only_layers`."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        dense, step = entries(hf, "mlp_only_layers"), count(hf, "decoder_sparse_step")
        layers = range(whole(hf, "num_hidden_layers"))
        experts = [layer not in dense and not (layer + 1) % step for layer in layers]
        return fields | {"moe_layer_freq": pattern_text(experts, usual=True) or "1"}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        return hf | {"mlp_only_layers": list(config.dense_layers), "decoder_sparse_step": 1}


class LayersWithExperts(Adapter):
    """Adapter for the MoE layers of Llama 4. A config.json either lists the MoE layers, or states that every N-th layer
    is an MoE layer."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | {"moe_layer_freq": moe_layers_from_hf(hf)}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        return hf | {"moe_layers": list(config.moe_layers)}


class LinearAttention(Adapter):
    """Adapter for the pattern of layers with linear attention. `linear_layers` describes the config.json keys."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | {"linear_attention_freq": pattern_text(linear_layers(hf, family), usual=True)}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        hf = hf | {"layer_types": [family.linear_kind if linear else FULL for linear in config.linear_pattern]}
        if "attn_layer_indices" in family.defaults:
            hf["attn_layer_indices"] = [layer for layer, linear in enumerate(config.linear_pattern) if not linear]
        return hf


class PeriodsOfLayers(Adapter):
    """Adapter for Jamba. Jamba's config.json describes both the attention layers and the MoE layers by a period and an
    offset."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        attention, experts = periodic(hf, "attn"), periodic(hf, "expert")
        return fields | {
            "linear_attention_freq": pattern_text([not attends for attends in attention], usual=True),
            "moe_layer_freq": pattern_text(experts, usual=True) or "1",
            "num_experts": None if fields["num_experts"] == 1 or not any(experts) else fields["num_experts"],
        }

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        attention = _period("attn", [not linear for linear in config.linear_pattern])
        return hf | attention | _period("expert", config.expert_pattern) | {"num_experts": config.num_experts or 1}


def _period(of: str, layers: Sequence[bool]) -> dict[str, int]:
    """Return the config.json keys for the period and the offset of the layers that are True in `layers`. These layers
    must be `offset`, `offset` + `period`, `offset` + 2 * `period` and so on; otherwise, the result is wrong."""
    first, *others = [number for number, chosen in enumerate(layers) if chosen] or [len(layers)]
    period = others[0] - first if others else len(layers) + 1
    return {f"{of}_layer_period": period, f"{of}_layer_offset": first}


class RecurrentBlocks(Adapter):
    """Adapter for RecurrentGemma. Its config.json contains a repeating sequence of layer kinds, and an MLP width that
    is the sum of the gate and up widths. The model multiplies embeddings by the square root of the hidden size."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        kinds = list(islice(cycle(entries(hf, "block_types")), whole(fields, "num_layers")))
        listed = listed_layers({**hf, "block_types": kinds}, "block_types", ("attention", "recurrent"))
        return fields | {
            "linear_attention_freq": pattern_text(listed, usual=True),
            "embedding_multiplier": _in_bf16(math.sqrt(whole(fields, "hidden_size"))),
            "ffn_hidden_size": whole(fields, "ffn_hidden_size") // 2,
        }

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        kinds = ["recurrent" if linear else "attention" for linear in config.linear_pattern]
        return hf | {"block_types": kinds, "intermediate_size": whole(hf, "intermediate_size") * 2}


def _in_bf16(value: float) -> float:
    """Round a number to bf16. RecurrentGemma stores the embedding scale in bf16."""
    (bits,) = struct.unpack("I", struct.pack("f", value))
    (rounded,) = struct.unpack("f", struct.pack("I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))
    return float(rounded)


class LettersOfLayers(Adapter):
    """Adapter for the layer pattern of Nemotron-H. When config.json is read, fields of layer kinds that do not occur in
    the pattern are removed. When config.json is written, keys whose value is None are removed."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        letters = text(fields, "hybrid_layer_pattern")
        absent = [start for letter, starts in FIELDS_OF.items() if letter not in letters for start in starts]
        return {name: value for name, value in fields.items() if not name.startswith(tuple(absent))}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        return {key: value for key, value in hf.items() if value is not None}


class SameLetter(Adapter):
    """Adapter for the layer pattern of Mamba models, whose layers all have the same letter."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | {"hybrid_layer_pattern": text(fields, "hybrid_layer_pattern") * whole(fields, "num_layers")}


class WidthToMultiple(Adapter):
    """Adapter for the MLP width of LFM2. If `block_auto_adjust_ff_dim` is True, the width in config.json is multiplied
    by 2/3. If `block_ffn_dim_multiplier` is not null, the result is also multiplied by this factor and rounded up to a
    multiple of `block_multiple_of`."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        if not hf["block_auto_adjust_ff_dim"]:
            return fields
        width = int(2 * whole(fields, "ffn_hidden_size") / 3)
        if hf["block_ffn_dim_multiplier"] is not None:
            multiple = whole(hf, "block_multiple_of")
            width = math.ceil(int(number(hf, "block_ffn_dim_multiplier") * width) / multiple) * multiple
        return fields | {"ffn_hidden_size": width}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        return hf | {"block_auto_adjust_ff_dim": False}


class HeadsByLayer(Adapter):
    """Adapter for Laguna. Its config.json lists the number of attention heads of each layer. All layers of the same
    kind must have the same number of heads."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        if not hf["num_attention_heads_per_layer"]:
            return fields
        full, local = by_kind(hf, family, "num_attention_heads_per_layer")
        return fields | {"num_attention_heads": full or local, "window_num_attention_heads": local}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        heads = [config.of_layer(layer).num_attention_heads for layer in range(config.num_layers)]
        return hf | {"num_attention_heads_per_layer": heads}


class RotaryBasesByLayer(Adapter):
    """Adapter for Granite with sliding windows. Its config.json lists the rotary base of each layer. All layers of the
    same kind must have the same base."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | bases_from_hf(hf, family) if hf["layer_rope_theta"] else fields

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        bases = [(config.window_rotary_base if local else None) or config.rotary_base for local in config.local_pattern]
        rotated = zip(bases, config.rope_pattern, strict=True)
        return hf | {"layer_rope_theta": [base * rotates for base, rotates in rotated]}


class RotaryBaseOfAttention(Adapter):
    """Adapter for the rotary base in DBRX's attention settings. If config.json also contains a rotary base outside
    these settings, the two rotary bases must be equal."""

    key = "attn_config.rope_theta"

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        if hf.get(self.key) is None:
            return fields
        base = float(number(hf, self.key))
        if (table(hf, "rope_parameters") or hf.get("rope_theta") is not None) and fields["rotary_base"] != base:
            raise ValueError(f"config.json: {self.key} = {base:g} differs from rope_theta = {fields['rotary_base']}")
        return fields | {"rotary_base": base}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        return hf | {self.key: config.rotary_base}


class LayersWithoutRotary(Adapter):
    """Adapter for the layers without rotary embedding in SmolLM3 and Llama 4. A config.json either lists these layers,
    or states that every N-th layer has no rotary embedding."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | {"no_rope_freq": pattern_text([not rotated for rotated in rotated_layers(hf)], usual=False)}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        return hf | {"no_rope_layers": [int(rotated) for rotated in config.rope_pattern]}


class ChunksAndTemperature(Adapter):
    """Adapter for Llama 4's chunked attention, and for its attention temperature, which grows with the position."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        temperature = float(number(hf, "attn_scale")) if hf["attn_temperature_tuning"] else 0.0
        return fields | chunks_from_hf(hf) | {"attention_temperature_coeff": temperature}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        coefficient = config.attention_temperature_coeff
        return hf | {
            "attention_chunk_size": config.attention_chunk_size,
            "layer_types": [CHUNKED if local else FULL for local in config.local_pattern],
            "attn_temperature_tuning": coefficient > 0,
            "attn_scale": coefficient or family.defaults["attn_scale"],
        }


class SelectingLayers(Adapter):
    """Adapter for GLM with sparse attention. Some layers select the keys to attend to. The other layers reuse the keys
    that an earlier layer selected."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | selections_from_hf(hf)

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        period, offset = whole(stated, "dsa_indexer_topk_freq"), whole(stated, "dsa_indexer_skip_topk_offset")
        full = selecting(period, max(offset, 1), config.num_layers)
        return hf | {"indexer_types": ["full" if each else "shared" for each in full]}


class CompressedAttention(Adapter):
    """Adapter for DeepSeek-V4's layers with compressed keys, layers with hash routing, and two rotary embeddings."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | compressed_from_hf(hf)

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        scaling = table(hf, "rope_scaling") or {"rope_type": "default"}
        unscaled = {key: value for key, value in hf.items() if key != "rope_scaling"}
        return unscaled | compressed_to_hf(config, stated, scaling)


ADAPTERS: Mapping[str, Adapter] = {
    cls.__name__: cls()
    for cls in (
        GroupsByTwoExperts,
        GroupsByBestExpert,
        FirstLayersDense,
        ListedLayersDense,
        LayersWithExperts,
        LinearAttention,
        PeriodsOfLayers,
        RecurrentBlocks,
        LettersOfLayers,
        SameLetter,
        WidthToMultiple,
        HeadsByLayer,
        RotaryBasesByLayer,
        RotaryBaseOfAttention,
        LayersWithoutRotary,
        ChunksAndTemperature,
        SelectingLayers,
        CompressedAttention,
        RotaryOfKinds,
        WithoutLogitScale,
        MeanOfExperts,
        ConvolutionsAndWindows,
        KimiHeadsOfModel,
        WidthsOfGlobalHeads,
        LayersWithoutKeys,
        SizeOfLayerEmbeddings,
        HalvesOfWindows,
    )
}
"""All adapters, keyed by the names that family files use."""
