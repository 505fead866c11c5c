"""DeepSeek sparse attention (DSA) of DeepSeek-V3.2 and GLM-5, and compressed attention (CSA and HCA) of DeepSeek-V4. In
DSA, an indexer selects the keys that each query attends to. In compressed attention, queries attend to a window of
recent tokens, and to compressed keys, each of which summarizes several earlier tokens.

DSA is enabled by --experimental-attention-variant dsa together with --multi-latent-attention, or by the letter D in
--hybrid-layer-pattern. The flags --dsa-indexer-n-heads, --dsa-indexer-head-dim and --dsa-indexer-topk set the shape of
the indexer; --dsa-indexer-loss-coeff and --dsa-indexer-use-sparse-loss control the indexer loss. With
--dsa-indexer-topk-freq and --dsa-indexer-skip-topk-offset, layers share the selected keys. Compressed attention is
enabled by --experimental-attention-variant dsv4_hybrid. The flags of compressed attention are --csa-compress-ratios,
--csa-window-size, --csa-compress-rotary-base, --o-groups and --o-lora-rank.

Read `sparse_attention.py` first, which contains the DSA module. The functions in `selection.py`,
`selected_attention.py` and `indexer_loss.py` process chunks of queries. `compressed_attention.py` contains the
compressed attention module, and the folder `kernels` contains the GPU kernels.
"""
