"""Multi-latent attention (MLA) of DeepSeek-V2 and V3, and of models built like them (Kimi K2).

Flags: --multi-latent-attention, or --attention-module multi_latent_attention, with the widths --q-lora-rank,
--kv-lora-rank, --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim. --recompute-modules mla_up_proj computes heads
again from latents in the backward pass.

Read first: `multi_latent_attention.py`, the module; `parameters.py`, its weights.
"""
