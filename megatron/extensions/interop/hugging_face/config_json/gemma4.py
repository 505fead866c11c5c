"""Settings of Gemma 4 in a config.json: layers without a sliding window have heads of another width. No torch."""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import Fields, Values, table, whole
from megatron.extensions.interop.hugging_face.config_json.read_layers import count, windows
from megatron.extensions.interop.hugging_face.families import Adapter, Family

OF_LAYERS = "per_layer_config"
"""Key with the settings of single layers, by their numbers as text."""


class WidthsOfGlobalHeads(Adapter):
    """Width and groups of heads in layers without a window: keys of older files, or settings of each such layer in
    newer ones. `_of_single_layers` compares all of the latter with the layers that are read."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        local = windows(hf, family)
        if local[-1]:
            raise ValueError("config.json: the last of layer_types is sliding_attention; supported: full_attention")
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
        """Settings of the last layer, which has no window."""
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
