"""YaRN: its rules, and its frequencies against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import notices, resolve, validate
from tests.gpt_cases import STYLES

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 100 --mock-data "
    "--global-batch-size 8 --train-iters 1 --lr 1e-3 --position-embedding-type rope "
)


def problems(flags: str, world_size: int = 1) -> list[str]:
    config = resolve(parse_args((BASE + flags).split()), world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--rotary-scaling-factor 4", "--rotary-scaling-factor 4.0: has no effect without --rope-type yarn"),
        ("--rope-type yarn --rotary-scaling-factor 0.5", "--rotary-scaling-factor 0.5: must be at least 1"),
        ("--rope-type yarn --beta-slow 32", "--beta-slow 32.0: must be below --beta-fast 32"),
        ("--rope-type yarn --position-embedding-type none", "--rope-type yarn: has no effect without --position-emb"),
        (
            "--rope-type yarn --rotary-scaling-factor 4 --use-rope-scaling",
            "--use-rope-scaling: cannot be combined with --rope-type yarn: both scale",
        ),
    ],
)
def test_rules(flags: str, expected: str) -> None:
    found = problems(flags)
    assert any(expected in problem for problem in found), found


def test_legal() -> None:
    assert problems("--rope-type yarn --rotary-scaling-factor 4 --beta-fast 16") == []


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
    ours = RotaryEmbedding(config, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(ours.frequencies, frequencies, rtol=1e-6, atol=0)
    assert ours.mscale == pytest.approx(factor, rel=1e-12)
    cos, _ = ours(torch.zeros(1))
    assert cos.flatten().tolist() == pytest.approx([factor] * 16)


def test_yarn_of_factor_one_changes_nothing() -> None:
    plain, yarn = STYLES["llama"], replace(STYLES["llama"], rope_type="yarn")
    tables = [RotaryEmbedding(config, torch.device("cpu"), torch.float32)(torch.arange(9)) for config in (plain, yarn)]
    torch.testing.assert_close(tables[0], tables[1], rtol=0, atol=1e-6)
