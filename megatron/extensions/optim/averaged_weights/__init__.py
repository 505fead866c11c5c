"""Exponential moving averages of the weights, which are updated during training and can be used in evaluations. A run
can have several averages.

Flags: --ema-decay, --ema-half-life-tokens, --eval-weights. The implementation is in `averages.py`.
"""
