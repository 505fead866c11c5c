"""Test that exports of randomly drawn models are either refused with a reason, or load back as the same model, bit for
bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.core.config.model import TransformerConfig
from tests.extensions.hugging_face.drawn_exports import EXPORTED, REFUSED, draws, verdicts
from tests.gpt_cases import LLAMA
from tests.moe_cases import DEEPSEEK

BIASED_EXPERTS = replace(DEEPSEEK, moe_shared_expert_intermediate_size=None)
"""Model with sigmoid scores and an expert bias. Several families support both features, and the first of these families
require different head widths for keys and values."""


@pytest.mark.parametrize(
    ("config", "family"),
    [
        (BIASED_EXPERTS, "mimo_v2_flash"),
        (replace(BIASED_EXPERTS, kv_channels=8, value_channels=6), "mimo_v2_flash"),
        (replace(LLAMA, qk_layernorm=True, head_wise_attn_gate=True, attention_gate_function="softplus"), "laguna"),
    ],
)
def test_models_export_to_families_with_one_or_two_head_widths(config: TransformerConfig, family: str) -> None:
    found = dict(verdicts(config))
    assert found[family] == EXPORTED and {*found.values()} == {EXPORTED}


@pytest.mark.grid("seed", range(3), range(12))
def test_drawn_models_export_exactly_or_are_refused(seed: int) -> None:
    wrong = [
        f"{family} of {text}: {verdict}"
        for text, config in draws(6, seed)
        for family, verdict in verdicts(config)
        if verdict not in (EXPORTED, REFUSED)
    ]
    assert not wrong, "\n".join(wrong)
