"""Multi-latent attention: its rules, and what is cached."""

from __future__ import annotations

import pytest
import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import notices, resolve, validate
from tests.extensions import installed, needs
from tests.gpt_cases import FP64, LATENT, logits_in_parts, random_batch

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 --vocab-size 100 --mock-data "
    "--global-batch-size 8 --train-iters 1 --lr 1e-3 --position-embedding-type rope "
)
MLA = "--multi-latent-attention "


def problems(flags: str, world_size: int = 1) -> list[str]:
    config = resolve(parse_args((BASE + flags).split()), world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"{MLA} --group-query-attention --num-query-groups 2", f"{MLA[:-1]}: cannot be combined with --group-query"),
        (f"{MLA} --position-embedding-type alibi", "cannot be combined with --position-embedding-type alibi"),
        (f"{MLA} --attention-output-gate", "--multi-latent-attention: cannot be combined with --attention-output-gate"),
        (f"{MLA} --qk-layernorm --qk-layernorm-scope all", "--qk-layernorm-scope all: is not known to --multi-latent"),
        (f"{MLA} --head-wise-attn-gate", "cannot be combined with --head-wise-attn-gate"),
        (f"{MLA} --value-channels 8", "cannot be combined with --value-channels 8"),
        (f"{MLA} --qk-l2-norm", "--qk-l2-norm: cannot be combined with --multi-latent-attention"),
        (f"{MLA} --attention-temperature-coeff 0.1", "-coeff 0.1: cannot be combined with --multi-latent-attention"),
        ("--attention-module multi_latent_attention --qk-l2-norm", "cannot be combined with --multi-latent-attention"),
        (f"{MLA} --kv-channels 16", "--kv-channels 16: has no effect with --multi-latent-attention, whose heads are"),
        (f"{MLA} --rotary-interleaved", "--rotary-interleaved: has no effect with --multi-latent-attention, which"),
        (f"{MLA} --add-qkv-bias", "--add-qkv-bias: has no effect with --multi-latent-attention, whose projections"),
        (f"{MLA} --qk-pos-emb-head-dim 7", "--qk-pos-emb-head-dim 7: times --rotary-percent 1 rotates 7 channels; it"),
        (f"{MLA} --kv-lora-rank 0", "--kv-lora-rank 0: must be above 0"),
        (f"{MLA} --q-lora-rank 0", "--q-lora-rank 0: must be above 0"),
        ("--kv-lora-rank 64", "--kv-lora-rank 64: has no effect without --multi-latent-attention"),
        ("--recompute-granularity selective --recompute-modules mla_up_proj", "mla_up_proj: has no effect without"),
        needs(
            "fp8",
            f"{MLA} --bf16 --fp8-format e4m3 --kv-lora-rank 24",
            "--kv-lora-rank 24: must be a multiple of 16 under",
        ),
        needs(
            "fp8",
            f"{MLA} --bf16 --fp8-format e4m3 --v-head-dim 3",
            "--v-head-dim 3: times the 8 heads of a rank must be a mul",
        ),
    ],
)
def test_rules(flags: str, expected: str) -> None:
    found = problems(flags)
    assert any(expected in problem for problem in found), found


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (f"{MLA} --hidden-size 60", 1),  # which need not be a multiple of the heads
        needs("fp8", f"{MLA} --tp 4 --sequence-parallel --bf16 --fp8-format e4m3 --micro-batch-size 2", 4),
        (f"{MLA} --rotary-scaling-factor 40 --mscale 0.7 --mscale-all-dim 0.7 --q-lora-rank 24", 1),
        ("--attention-module multi_latent_attention --v-head-dim 16", 1),
    ],
)
def test_legal(flags: str, world_size: int) -> None:
    assert problems(flags, world_size) == []


@pytest.mark.skipif(not installed("fp8"), reason="fp8 is deleted")
def test_tokens_of_a_rank_in_fp8() -> None:
    found = problems(f"{MLA} --tp 8 --sequence-parallel --bf16 --fp8-format e4m3", 8)
    assert any("--seq-length 64: gives a rank 8 tokens of a micro-batch to project" in problem for problem in found)


def test_generation_caches_latents() -> None:
    """As many numbers for each token as the latent and the rotary key have, and the logits of the whole text."""
    widths = LATENT.options(LatentAttentionFlags)
    model, tokens = GPTModel(LATENT, FP64), random_batch(LATENT).tokens
    found, cache = logits_in_parts(model, tokens, (6, 1, 4, 5))
    torch.testing.assert_close(found, model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
    kept = [x.shape[1] * x.shape[3] for layer in cache._layers.values() for x in layer]
    assert kept == [widths.kv_lora_rank + widths.qk_pos_emb_head_dim] * LATENT.num_layers
