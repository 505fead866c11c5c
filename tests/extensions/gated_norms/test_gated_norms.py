"""Compare parallel layouts of models with gated norms and gated latent attention with one process. The tests in
tests/extensions/hugging_face compare logits and gradients with transformers."""

from __future__ import annotations

import pytest

from megatron.testing.parity import main as parity
from tests.extensions import needs

FLAGS = "--layer-module gated_norms --gated-norm-rank 6 --normalization RMSNorm --position-embedding-type rope"
LATENTS = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim "
    "5 --qk-layernorm --mla-latent-gate --num-experts 4 --moe-router-topk 2"
)


@pytest.mark.parametrize("more", ["", needs("latent_attention", LATENTS)])
def test_layouts_compute_the_same(more: str) -> None:
    rows = ["tp2-sp", "recompute-selective"]
    flags = f"{FLAGS} {more} --recompute-modules layernorm core_attn"
    assert parity(["--layouts", *rows, "--steps", "1", "--", *flags.split(), "--num-layers", "2"]) == 0
