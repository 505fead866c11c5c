"""Multi-latent attention (MLA) of DeepSeek-V2 and V3, and of models with the same design (Kimi K2).

Flags: --multi-latent-attention, or --attention-module multi_latent_attention, with the widths --q-lora-rank,
--kv-lora-rank, --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim. With --recompute-modules mla_up_proj, the
backward pass recomputes queries, keys and values from the latents.

Read `multi_latent_attention.py` first, which contains the module and its weights.
"""
