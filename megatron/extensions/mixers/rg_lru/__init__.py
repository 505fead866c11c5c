"""RG-LRU: a gated real-valued recurrence that replaces most attention layers of Griffin and RecurrentGemma.

The mixer is selected by the letter R of --hybrid-layer-pattern, or by --experimental-attention-variant rg_lru in layers
that also have an MLP. Shape flags: --rg-lru-width, --rg-lru-num-blocks and --rg-lru-conv-kernel-dim.

The implementation is in `rg_lru.py`.
"""
