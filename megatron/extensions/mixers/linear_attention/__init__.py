"""Gated delta nets: linear attention used in three out of four layers of Qwen3-Next.

The mixer is selected by --experimental-attention-variant gated_delta_net for the layers that --linear-attention-freq
selects, or by the letter G of --hybrid-layer-pattern. Shape flags: --linear-num-key-heads, --linear-num-value-heads,
--linear-key-head-dim, --linear-value-head-dim and --linear-conv-kernel-dim.

Read `gated_delta_net.py` first, which contains the module, then `gated_delta_rule.py`, which computes the recurrence.
"""
