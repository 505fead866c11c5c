"""Keys of config.json that have a value for each kind of layer, with or without a sliding window. No torch."""

from __future__ import annotations

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.config_json.config_values import Fields, Values, table
from megatron.extensions.interop.hugging_face.config_json.read_layers import FULL, LOCAL, pattern_text, windows
from megatron.extensions.interop.hugging_face.config_json.read_rotary import rotary_from_hf
from megatron.extensions.interop.hugging_face.families import Adapter, Family


class RotaryOfKinds(Adapter):
    """Rotary embeddings of layers with and without a sliding window; null for none (Command A Vision, Beam)."""

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
            raise ValueError("config.json: rope_parameters has null for every kind of layer")
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
    """Whether layers with a window, or those without, have a rotary embedding: both values if they differ."""
    return {rotated for window, rotated in layers if window == local}


class WithoutLogitScale(Adapter):
    """No factor of logits where the key has null (Command A Vision)."""

    def read(self, fields: Fields, hf: Values, family: Family) -> Fields:
        return fields | ({"logits_scaling": 1.0} if fields.get("logits_scaling") is None else {})
