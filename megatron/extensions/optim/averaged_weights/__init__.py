"""Exponential moving averages of the weights, several at once, updated during training and evaluated on demand.

Flags: --ema-decay, --ema-half-life-tokens, --eval-weights. Read `averages.py`.
"""
