"""Lightning attention: linear attention whose heads decay at fixed rates, used by MiniMax-Text-01.

The mixer is selected by the letter L of --hybrid-layer-pattern, or by --experimental-attention-variant
lightning_attention in layers that also have an MLP. --num-attention-heads and --kv-channels set the number and the
width of heads. Flag: --lightning-chunk-size. The implementation is in `lightning_attention.py`.
"""
