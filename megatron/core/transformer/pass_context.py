"""Objects shared by the passes of all stages of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.collectives import PassPair
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.core.transformer.activation_store import ActivationStore


@dataclass(frozen=True)
class PassContext:
    """Objects that all stages of a rank use in their forward and backward passes, and that the gradient buffers and the
    pipeline use too."""

    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    """Queue of weight gradients that a split backward pass computes later."""

    casts: WeightCasts = field(default_factory=WeightCasts)
    """Cache of parameters that have been cast to another dtype."""

    pair: PassPair = field(default_factory=PassPair)
    """Object that runs this pass and a pass of another micro-batch on the same rank, either one after the other or
    interleaved."""

    offload: ActivationStore | None = None
    """Store that holds activations until the backward pass. If None, activations stay on the device."""
