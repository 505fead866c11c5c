"""Checkpoints keep the widths of multi-latent attention, also those from before they were flags of an extension."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections, values_by_section
from megatron.training.config.saved_flags import changed_fields, with_saved_flags

SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 "
MLA = SHAPE + "--multi-latent-attention --kv-lora-rank 12"


@pytest.mark.parametrize("before", [True, False], ids=["before", "now"])
def test_widths_are_taken_from_checkpoints_and_compared(before: bool, tmp_path: Path) -> None:
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
