"""Registers the activation function xIELU. This module does not import torch."""

from __future__ import annotations

from megatron.core.config.activations import ACTIVATIONS

ACTIVATIONS.register("xielu", f"{__package__}.xielu:XIELU")
