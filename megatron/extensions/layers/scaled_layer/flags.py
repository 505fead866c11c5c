"""Registers layers whose output is multiplied by a stored scalar. This module does not import torch."""

from __future__ import annotations

from megatron.core.config.layers import LAYERS

NAME = "scaled_layer"

LAYERS.register(NAME, f"{__package__}.layer:ScaledLayer")
