"""Objects that the forward and backward passes of all stages on a rank share."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.collectives import PassPair
from megatron.core.tensor_parallel.linear_gemms import WeightCasts
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.core.transformer.activation_store import ActivationStore


@dataclass(frozen=True)
class PassContext:
    """Objects that all stages on a rank use in their forward and backward passes. The pipeline executor and
    `DistributedDataParallel` use the same objects."""

    queue: WeightGradQueue = field(default_factory=WeightGradQueue)
    """Queue of weight-gradient jobs. If a schedule splits backward passes, the jobs run later than the input
    gradients."""

    casts: WeightCasts = field(default_factory=WeightCasts)
    """Cache of parameters that have been cast to another dtype."""

    pair: PassPair = field(default_factory=PassPair)
    """Object that runs the passes of two micro-batches on this rank, either one after the other or interleaved."""

    offload: ActivationStore | None = None
    """Store that holds activations until the backward pass. If None, activations stay on the device."""
