"""RG-LRU, a recurrence of real numbers with gates, as Griffin and RecurrentGemma have it in place of most attention.

Chosen by the letter R of --hybrid-layer-pattern, or by --experimental-attention-variant rg_lru in layers that also have
an MLP. Flags of its shape: --rg-lru-width, --rg-lru-num-blocks and --rg-lru-conv-kernel-dim.

Read first: `rg_lru.py`, the module.
"""
