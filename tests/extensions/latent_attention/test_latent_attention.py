"""What multi-latent attention caches."""

from __future__ import annotations

import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.latent_attention.flags import LatentAttentionFlags
from tests.gpt_cases import FP64, LATENT, logits_in_parts, random_batch


def test_generation_caches_latents() -> None:
    """As many numbers for each token as the latent and the rotary key have, and the logits of the whole text."""
    widths = LATENT.options(LatentAttentionFlags)
    model, tokens = GPTModel(LATENT, FP64), random_batch(LATENT).tokens
    found, cache = logits_in_parts(model, tokens, (6, 1, 4, 5))
    torch.testing.assert_close(found, model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
    kept = [x.shape[1] * x.shape[3] for layer in cache._layers.values() for x in layer]
    assert kept == [widths.kv_lora_rank + widths.qk_pos_emb_head_dim] * LATENT.num_layers
