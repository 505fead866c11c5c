"""Gated delta nets: linear attention used in three of four layers of Qwen3-Next.

Chosen by --experimental-attention-variant gated_delta_net; --linear-attention-freq says which layers have it. Flags
that set its shape: --linear-num-key-heads, --linear-num-value-heads, --linear-key-head-dim, --linear-value-head-dim and
--linear-conv-kernel-dim.

Read first: `gated_delta_net.py`, the module; `gated_delta_rule.py`, how it mixes tokens.
"""
