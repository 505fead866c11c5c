"""YaRN: its frequencies against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.transformer.rotary import RotaryEmbedding
from tests.gpt_cases import STYLES


@pytest.mark.parametrize(
    "scaling",
    [
        {"factor": 4.0, "original_max_position_embeddings": 64},
        {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.7, "mscale_all_dim": 0.5},
        {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 6.0, "beta_slow": 0.5},
        {"factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ],
)
def test_yarn_frequencies(scaling: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": "yarn", "rope_theta": 10000.0, **scaling}
    theirs = transformers.LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    fields = {**scaling, "rotary_scaling_factor": scaling["factor"]}
    del fields["factor"]
    fields["yarn_correction_range_round_to_int"] = fields.pop("truncate", True)
    config = replace(STYLES["llama"], hidden_size=64, num_attention_heads=2, rope_type="yarn", **fields)
    ours = RotaryEmbedding(config, torch.device("cpu"), torch.float32, config.rotation)
    torch.testing.assert_close(ours.frequencies, frequencies, rtol=1e-6, atol=0)
    assert ours.mscale == pytest.approx(factor, rel=1e-12)
    cos, _ = ours(torch.zeros(1))
    assert cos.flatten().tolist() == pytest.approx([factor] * 16)


def test_yarn_of_factor_one_changes_nothing() -> None:
    plain, yarn = STYLES["llama"], replace(STYLES["llama"], rope_type="yarn")
    tables = [
        RotaryEmbedding(config, torch.device("cpu"), torch.float32, config.rotation)(torch.arange(9))
        for config in (plain, yarn)
    ]
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=1e-6)
