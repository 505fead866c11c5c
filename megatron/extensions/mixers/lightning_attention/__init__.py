"""Lightning attention, a linear attention whose heads decay at fixed rates, as MiniMax-Text-01 has it.

Chosen by the letter L of --hybrid-layer-pattern, or by --experimental-attention-variant lightning_attention in layers
that also have an MLP. Heads are those of --num-attention-heads and --kv-channels. Its flag: --lightning-chunk-size.

Read first: `lightning_attention.py`, the module.
"""
