"""Conversion of Gemma 4's settings in config.json: a separate head width for layers without a sliding window, layers
that reuse the keys and values of earlier layers, and per-layer embeddings. This module does not import torch."""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import Fields, Values, table, whole
from megatron.extensions.interop.hugging_face.config_json.read_layers import count, windows
from megatron.extensions.interop.hugging_face.families import Adapter, Family

OF_LAYERS = "per_layer_config"
"""Key of config.json that maps layer numbers, as strings, to settings of individual layers."""


class WidthsOfGlobalHeads(Adapter):
    """Adapter for the head width and the number of query groups in layers without a sliding window. Older files store
    these two values under separate keys of config.json. Newer files store the two values for each layer without a
    sliding window. This adapter reads the values of the last layer, and `_of_single_layers` checks that all other
    layers without a sliding window have the same values."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        local = windows(hf, family)
        if local[-1]:
            raise ValueError(
                "config.json: the last entry of layer_types is sliding_attention; supported: full_attention"
            )
        own = self._of_last(hf, len(local) - 1)
        groups = own.get("num_key_value_heads", hf["num_key_value_heads"])
        found: Fields = {"kv_channels": count({**hf, **own}, "head_dim"), "num_query_groups": groups}
        if groups == fields["num_attention_heads"]:
            found["num_query_groups"] = None
        found["group_query_attention"] = found["num_query_groups"] is not None
        if any(local):
            of_windows = count(hf, "num_key_value_heads")
            found["window_kv_channels"] = count(hf, "head_dim")
            found["window_num_query_groups"] = of_windows if of_windows != groups else None
        return fields | found

    @staticmethod
    def _of_last(hf: Values, last: int) -> Values:
        """Return the settings of the last layer. The last layer must not have a sliding window."""
        if hf[OF_LAYERS] is not None:
            given = table(hf, OF_LAYERS)
            return table(given, str(last)) if str(last) in given else {}
        groups = hf["num_global_key_value_heads"] if hf["attention_k_eq_v"] else None
        own = {"head_dim": hf["global_head_dim"], "num_key_value_heads": groups}
        return {key: value for key, value in own.items() if value is not None}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        everywhere = [layer for layer, local in enumerate(config.local_pattern) if not local]
        own: Fields = {"head_dim": config.head_dim, "num_key_value_heads": config.query_groups}
        usual: Fields = {
            "head_dim": whole(stated, "window_kv_channels"),
            "num_key_value_heads": whole(stated, "window_num_query_groups"),
        }
        differing = {key: value for key, value in own.items() if value != usual[key]}
        unstated = {key: value for key, value in hf.items() if not key.startswith(("global_", "num_global_"))}
        return unstated | usual | {OF_LAYERS: {str(layer): differing for layer in everywhere if differing}}


class LayersWithoutKeys(Adapter):
    """Adapter for the last layers of Gemma 4, which reuse the keys and values of earlier layers. The MLPs of the last
    layers may be twice as wide as the MLPs of other layers."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        shared, layers = whole(hf, "num_kv_shared_layers"), whole(hf, "num_hidden_layers")
        local = windows(hf, family)
        own, others = local[: layers - shared], local[layers - shared :]
        if shared < 0 or shared >= layers or not {*others} <= {*own}:
            rule = "is invalid: before the layers that reuse keys and values, each kind of layer in layer_types"
            raise ValueError(f"config.json: num_kv_shared_layers = {shared} {rule} must occur at least once")
        found: Fields = {"kv_shared_layers": shared}
        if shared and hf["use_double_wide_mlp"]:
            width = whole(fields, "ffn_hidden_size")
            found["ffn_hidden_size_pattern"] = str([width] * len(own) + [2 * width] * shared)
        return fields | found

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        wide = config.ffn_sizes[-1] == 2 * config.ffn_sizes[0]
        return hf | {
            "num_kv_shared_layers": stated["kv_shared_layers"],
            "use_double_wide_mlp": wide,
            "intermediate_size": config.ffn_sizes[0],
        }


class SizeOfLayerEmbeddings(Adapter):
    """Adapter for the size of Gemma 4's per-layer embeddings. The size is 0 if a model has no per-layer embeddings. The
    embedding tables must have one row per token of the model's vocabulary."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        size = whole(hf, "hidden_size_per_layer_input")
        rows, tokens = whole(hf, "vocab_size_per_layer_input"), whole(hf, "vocab_size")
        if size and rows != tokens:
            raise ValueError(f"config.json: vocab_size_per_layer_input = {rows} differs from vocab_size = {tokens}")
        return fields | {"per_layer_embedding_size": size or None}

    def write(self, hf: Fields, config: TransformerConfig, stated: Values, family: Family) -> Fields:
        size = stated["per_layer_embedding_size"] or 0
        return hf | {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": config.vocab_size}
