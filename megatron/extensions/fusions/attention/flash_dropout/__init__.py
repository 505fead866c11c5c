"""Attention with dropout in one fused kernel of GPUs, whose masks are those of `megatron.core.dropout`.

Its twin in torch is `TorchKernel` (`megatron.core.attention.tile_kernels`): the same masks, sums in another order.
"""
