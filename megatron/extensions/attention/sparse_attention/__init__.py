"""DeepSeek sparse attention (DSA) of DeepSeek-V3.2 and GLM-5: an indexer selects the keys that each query attends to.
Compressed attention of DeepSeek-V4 (CSA and HCA): queries attend to a window of recent tokens, and to compressed keys,
each of which summarizes several earlier tokens.

Flags: --experimental-attention-variant dsa together with --multi-latent-attention, or D in --hybrid-layer-pattern. The
flags --dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk set the shape of the indexer;
--dsa-indexer-loss-coeff and --dsa-indexer-use-sparse-loss control the indexer loss. With --dsa-indexer-topk-freq and
--dsa-indexer-skip-topk-offset, layers share the selected keys. Compressed attention is --experimental-attention-variant
dsv4_hybrid, with --csa-compress-ratios, --csa-window-size, --csa-compress-rotary-base, --o-groups and --o-lora-rank.

Read first: `sparse_attention.py` contains the module of DSA. `selection.py`, `selected_attention.py` and
`indexer_loss.py` process chunks of queries. `compressed_attention.py` contains the module of DeepSeek-V4. The folder
`kernels` contains the GPU kernels.
"""
