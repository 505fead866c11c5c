"""Conversion of Command A+'s keys in config.json. The keys select whether shared and routed experts are combined by a
sum or a mean, and describe the dense layers before the MoE layers. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import Fields, Values, whole
from megatron.extensions.interop.hugging_face.config_json.read_layers import (
    FULL,
    LOCAL,
    count,
    listed_layers,
    pattern_text,
)
from megatron.extensions.interop.hugging_face.families import Adapter, Family

MODULE = "mean_of_experts"
"""Name of the layer module that averages experts; see `megatron.extensions.layers.mean_of_experts`."""


class MeanOfExperts(Adapter):
    """Adapter for models that combine shared and routed experts by a sum or a mean, and use RMSNorm or LayerNorm. The
    sliding-window pattern restarts after the dense layers.

    The first layers of Command A+ have dense MLPs. Dense layers may have a rotary embedding even if they have no
    sliding window.
    """

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        layers = whole(hf, "num_hidden_layers")
        dense = listed_layers(hf, "mlp_layer_types", ("sparse", "dense"), lambda layer: layer < _first(hf))
        local = listed_layers(hf, "layer_types", (FULL, LOCAL), list(_usual_windows(hf, layers)).__getitem__)
        if any(local) and hf["sliding_window"] is None:
            raise ValueError("config.json: sliding_window is null, but layer_types has layers with a sliding window")
        forced = hf["prefix_dense_sliding_window_pattern"] == 1
        rotated = [window or (forced and plain) for window, plain in zip(local, dense, strict=True)]
        softmax = hf["expert_selection_fn"] == "softmax"
        if not softmax and hf["norm_topk_prob"] and fields["moe_router_topk"] == 1:
            raise ValueError("config.json: num_experts_per_tok = 1 with norm_topk_prob; supported: 2 or more")
        rms = hf["rms_norm_eps"] is not None
        return (
            fields
            | self._mixture(hf, softmax)
            | {
                "window_size": count(hf, "sliding_window") if any(local) else None,
                "window_attn_skip_freq": pattern_text(local, usual=True) if any(local) else None,
                "no_rope_freq": pattern_text([not each for each in rotated], usual=False),
                "normalization": "RMSNorm" if rms else "LayerNorm",
                "norm_epsilon": hf["rms_norm_eps" if rms else "layer_norm_eps"],
                "ffn_hidden_size": hf["prefix_dense_intermediate_size"] or hf["intermediate_size"],
            }
        )

    def _mixture(self, hf: Values, softmax: bool) -> Fields:
        strategy = hf["shared_expert_combination_strategy"]
        if strategy not in ("average", "sum"):
            raise ValueError(f"config.json: shared_expert_combination_strategy = {strategy!r} is not supported")
        averaged = strategy == "average" and whole(hf, "num_shared_experts") > 0
        return {
            "layer_module": MODULE if averaged else "transformer_layer",
            "moe_router_topk_normalization": not softmax and bool(hf["norm_topk_prob"]),
        }

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        rms = config.normalization == "RMSNorm"
        rotated, layers = config.rope_pattern, range(config.num_layers)
        plain = [layer for layer in layers if not config.expert_pattern[layer] and not config.local_pattern[layer]]
        return hf | {
            "sliding_window": config.window_size or family.defaults["sliding_window"],
            "layer_types": [LOCAL if local else FULL for local in config.local_pattern],
            "prefix_dense_sliding_window_pattern": 1 if any(rotated[layer] for layer in plain) else 2,
            "prefix_dense_intermediate_size": config.ffn_size if config.dense_layers else None,
            "shared_expert_combination_strategy": "average" if config.layer_module == MODULE else "sum",
            "rms_norm_eps": config.norm_epsilon if rms else None,
            "layer_norm_eps": config.norm_epsilon,
            "norm_topk_prob": config.moe_router_topk_normalization or config.moe_router_scores == "softmax",
        }


def _first(hf: Values) -> int:
    return whole(hf, "first_k_dense_replace")


def _usual_windows(hf: Values, layers: int) -> Iterator[bool]:
    """Yield one bool per layer: True if the layer has a sliding window. This function is used if config.json does not
    list the layer kinds.

    The dense layers at the beginning and the remaining layers have separate patterns. In each pattern, every N-th layer
    has full attention, and all other layers have a sliding window. N is the value of
    prefix_dense_sliding_window_pattern or sliding_window_pattern, respectively.
    """
    counts: Sequence[int] = _first(hf), layers - _first(hf)
    for key, number in zip(("prefix_dense_sliding_window_pattern", "sliding_window_pattern"), counts, strict=True):
        for layer in range(number):
            yield bool((layer + 1) % count(hf, key))
