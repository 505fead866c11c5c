"""Adapters for config.json keys whose values differ between layers with and without a sliding window. This module does
not import torch."""

from __future__ import annotations

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
    FULL,
    LOCAL,
    count,
    pattern_text,
    windows,
)
from megatron.extensions.interop.hugging_face.config_json.read_rotary import rotary_from_hf
from megatron.extensions.interop.hugging_face.families import Adapter, Family


class RotaryOfKinds(Adapter):
    """Adapter for Command A Vision and Beam. In the config.json of these models, two separate objects describe the
    rotary embeddings of layers with a sliding window and of layers without a sliding window. If one of these objects is
    null, the layers of this kind have no rotary embedding."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        given = table(hf, "rope_parameters")
        if not given.keys() & {FULL, LOCAL}:
            return fields | rotary_from_hf(hf, family)
        local = windows(hf, family)
        kinds = {LOCAL if each else FULL for each in local}
        if missing := kinds - given.keys():
            raise ValueError(f"config.json: rope_parameters lacks {' and '.join(sorted(missing))}")
        tables = {kind: table(given, kind) for kind in kinds}
        rotated = {kind: each for kind, each in tables.items() if each}
        if not rotated:
            raise ValueError("config.json: rope_parameters is null for every kind of layer")
        usual = next(iter(rotated.values()))
        both = {kind: rotated.get(kind, usual) for kind in (FULL, LOCAL)}
        unrotated = [(LOCAL if each else FULL) not in rotated for each in local]
        found = rotary_from_hf({**hf, "rope_parameters": both}, family)
        return fields | found | {"no_rope_freq": pattern_text(unrotated, usual=False)}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        given = table(hf, "rope_parameters")
        layers = list(zip(config.local_pattern, config.rope_pattern, strict=True))
        unrotated = {kind for kind in (FULL, LOCAL) if _rotates(layers, kind == LOCAL) == {False}}
        return hf | {"rope_parameters": {kind: None if kind in unrotated else each for kind, each in given.items()}}


def _rotates(layers: list[tuple[bool, bool]], local: bool) -> set[bool]:
    """Return the set of values that `rotated` has in the layers of one kind. Each entry of `layers` is a pair (window,
    rotated): True if the layer has a sliding window, and True if it has a rotary embedding. If `local` is True, only
    layers with a sliding window are considered; otherwise, only layers without a sliding window."""
    return {rotated for window, rotated in layers if window == local}


class HalvesOfWindows(Adapter):
    """Adapter for ModernBERT's layers with a sliding window. The window size is half of `local_attention`."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        local = windows(hf, family)
        pattern = pattern_text(local, usual=True)
        window = {"window_size": count(hf, "local_attention") // 2, "window_attn_skip_freq": pattern}
        return fields | (window if any(local) else {})

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        window = family.defaults["local_attention"] if config.window_size is None else 2 * config.window_size
        kinds = [LOCAL if local else FULL for local in config.local_pattern]
        return hf | {"local_attention": window, "layer_types": kinds}


CONVOLUTION = "conv"
"""Value in layer_types for a layer with a short convolution."""


class ConvolutionsAndWindows(Adapter):
    """Adapter for the layer kinds of LFM3: short convolution, sliding-window attention, and full attention."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        layers = whole(hf, "num_hidden_layers")
        kinds = entries(hf, "layer_types") or [self._usual(layer) for layer in range(layers)]
        if unknown := {str(kind) for kind in kinds} - {CONVOLUTION, FULL, LOCAL}:
            raise ValueError(f"config.json: layer_types has {', '.join(sorted(unknown))}, which is not supported")
        if len(kinds) != layers:
            raise ValueError(f"config.json: layer_types has {len(kinds)} entries for {layers} layers")
        local = [kind == LOCAL for kind in kinds]
        return fields | {
            "linear_attention_freq": pattern_text([kind == CONVOLUTION for kind in kinds], usual=True),
            "window_size": count(hf, "sliding_window") if any(local) else None,
            "window_attn_skip_freq": pattern_text(local, usual=True) if any(local) else None,
        }

    @staticmethod
    def _usual(layer: int) -> str:
        """Return the kind of a layer if config.json lacks the key layer_types."""
        if layer % 4 == 2:
            return FULL
        return LOCAL if layer and layer % 4 == 0 else CONVOLUTION

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        layers = zip(config.linear_pattern, config.local_pattern, strict=True)
        kinds = [CONVOLUTION if mixed else LOCAL if local else FULL for mixed, local in layers]
        return hf | {"layer_types": kinds, "sliding_window": config.window_size or family.defaults["sliding_window"]}


class KimiHeadsOfModel(Adapter):
    """Adapter for the Kimi Delta Attention of Ling 3.0. In this model, Kimi Delta Attention layers have as many heads
    as the other attention layers. The decays in Kimi Delta Attention may have a lower bound."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        heads, width = whole(hf, "num_attention_heads"), hf["linear_head_dim"] or hf["head_dim"]
        if hf["linear_num_heads"] not in (None, heads):
            raise ValueError(f"config.json: linear_num_heads differs from num_attention_heads = {heads}")
        return fields | {
            "kda_num_heads": heads,
            "kda_head_dim": width,
            "kda_conv_kernel_dim": hf["linear_conv_kernel_dim"] or hf["short_conv_kernel_size"],
            "kda_decay_lower_bound": float(number(hf, "kda_lower_bound")) if hf["kda_safe_gate"] else None,
        }

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        bound = stated["kda_decay_lower_bound"]
        return hf | {
            "head_dim": stated["kda_head_dim"],
            "short_conv_kernel_size": stated["kda_conv_kernel_dim"],
            "kda_safe_gate": bound is not None,
            "kda_lower_bound": family.defaults["kda_lower_bound"] if bound is None else bound,
        }


class WithoutLogitScale(Adapter):
    """Adapter for the logit scale of Command A Vision. A null value in config.json means a scale of 1."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | ({"logits_scaling": 1.0} if fields.get("logits_scaling") is None else {})
