"""Names of parameters in Megatron-LM's checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.models.gpt.parameters import parameter_metas
from megatron.extensions.megatron_checkpoints.megatron_names import find_places, names_in, their_shape
from tests.gpt_cases import STYLES


@pytest.mark.parametrize("style", ["gpt", "llama", "qwen3", "sinks"])
def test_a_written_name_is_found_again(style: str) -> None:
    config = replace(STYLES[style], num_layers=2)
    metas = {meta.name: meta for meta in parameter_metas(config)}
    written = {names_in(name, False, ())[0][0]: their_shape(meta) for name, meta in metas.items()}
    assert len(written) == len(metas)
    places = find_places(metas, written, config.num_layers)
    assert {part.key for place in places.values() for part in place.parts} == set(written)


def test_a_sink_has_the_name_it_has_there() -> None:
    (name,), layer = names_in("decoder.layers.3.self_attention.core.softmax_offset", True, ())
    assert (name, layer) == ("decoder.layers.self_attention.core_attention.softmax_offset", 3)
