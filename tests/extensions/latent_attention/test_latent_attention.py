"""Tests of multi-latent attention: the cache during text generation, and the widths in checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.attention.latent_attention.flags import LatentAttentionFlags
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections, values_by_section
from megatron.training.config.saved_flags import changed_fields, with_saved_flags
from tests.gpt_cases import FP64, LATENT, logits_in_parts, random_batch


def test_generation_caches_latents() -> None:
    """The cache holds only the latent and the rotary key of each token. A model with this cache computes the same
    logits as a model that reads the whole text."""
    widths = LATENT.options(LatentAttentionFlags)
    model, tokens = GPTModel(LATENT, FP64), random_batch(LATENT).tokens
    found, cache = logits_in_parts(model, tokens, (6, 1, 4, 5))
    torch.testing.assert_close(found, model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
    kept = [x.shape[1] * x.shape[3] for layer in cache._layers.values() for x in layer]
    assert kept == [widths.kv_lora_rank + widths.qk_pos_emb_head_dim] * LATENT.num_layers


SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 "
MLA = SHAPE + "--multi-latent-attention --kv-lora-rank 12"


@pytest.mark.parametrize("before", [True, False], ids=["before", "now"])
def test_widths_are_read_from_checkpoints_and_compared(before: bool, tmp_path: Path) -> None:
    sections = values_by_section(parse_args(MLA.split()))
    if before:
        sections["model"] |= sections.pop("multi-latent attention")
    (tmp_path / "metadata.json").write_text(json.dumps({"config": sections}))
    saved = config_of_sections(sections)
    asks = [*SHAPE.split(), "--kv-lora-rank", "24", "--load", str(tmp_path), "--use-checkpoint-args"]
    config, notes = with_saved_flags(parse_args(asks))
    assert config.model.options(LatentAttentionFlags) == LatentAttentionFlags(True, kv_lora_rank=12)
    assert notes == ["--kv-lora-rank is 12, as in the checkpoint, not 24"]
    assert changed_fields(saved, config, sections) == []
    named = parse_args([*SHAPE.split(), "--attention-module", "multi_latent_attention", "--kv-lora-rank", "12"])
    assert changed_fields(saved, named, sections) == []
    assert changed_fields(saved, parse_args([*MLA.split(), "--v-head-dim", "64"]), sections) == [
        "--v-head-dim 128 in the checkpoint, 64 in the run"
    ]
