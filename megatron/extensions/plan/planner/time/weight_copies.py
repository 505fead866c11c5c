"""Predict the exposed time of copying weights and gradients to and from host memory.

Copies in both directions run at the same time, concurrently with the passes. During a pass, the parameters of the next
pass are copied to the device, and the gradients of the previous pass are copied to the host. From the second
micro-batch on, gradient sums are also copied to the device, because the next backward pass adds to them. Let C be the
time in seconds that a pass takes without copies. If `coming` bytes are copied to the device and `leaving` bytes are
copied to the host during the pass, the pass takes

max(C, coming / rate, leaving / rate)

seconds. Here, `rate` is the copy rate in each direction, `host_gb_per_second` in the device file. The time by which the
pass exceeds C is exposed: it extends the pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from megatron.core.distributed.param_layout import unit_of
from megatron.core.parallel_dims import ParallelDims
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.plan.planner.memory import DTYPE_BYTES, EMBEDDING, local_shape
from megatron.training.config.run_config import RunConfig


class UnitPass(NamedTuple):
    """Forward or backward pass of one unit, such as a layer, and the number of bytes that are copied before and after
    the pass."""

    seconds: float
    needed: float
    """Number of bytes that must be copied to the device before the pass."""

    left: float = 0.0
    """Number of bytes that are copied to the host after the pass."""


def exposed(passes: Sequence[UnitPass], gb_per_second: float) -> list[float]:
    """Return the number of seconds by which concurrent copies extend each pass. The passes form a cycle, in which the
    first pass follows the last pass."""
    found = []
    for number, own in enumerate(passes):
        coming, leaving = passes[(number + 1) % len(passes)].needed, passes[number - 1].left
        found.append(max(0.0, max(coming, leaving) / gb_per_second / 1e9 - own.seconds))
    return found


def streamed_elements(config: RunConfig, dims: ParallelDims, stage: Stage) -> list[float]:
    """Return the number of matrix elements that a rank stores for each part of a stage: the embedding, each layer, and
    the head."""
    found: dict[str, float] = {}
    for meta in stage_metas(config.model, stage, sequence_parallel=config.parallel.sequence_parallel):
        if meta.matrix and not config.optimizer.freezes(meta):
            kept = prod(local_shape(meta, dims)) / dims.shards(meta.expert)
            found[unit_of(meta.name)] = found.get(unit_of(meta.name), 0.0) + kept
    layers = [found.pop(f"decoder.layers.{number}", 0.0) for number in stage.layers]
    embedding = found.pop(EMBEDDING, 0.0)
    head = sum(found.values()) or embedding  # with tied embeddings, the head is the embedding
    return [*([embedding] if stage.first else []), *layers, *([head] if stage.last else [])]


def copies_beside(
    config: RunConfig, elements: Sequence[float], seconds: Sequence[tuple[float, float]], again: bool, rate: float
) -> tuple[float, float]:
    """Return the exposed copy times of a micro-batch in seconds, as (forward pass, backward pass).

    Args:
        config: The configuration.
        elements: Number of matrix elements in each part of the stage.
        seconds: (forward, backward) seconds of each part.
        again: True if gradient sums of earlier micro-batches are copied back.
        rate: Copy rate of one direction in GB/s.
    """
    dtype = config.optimizer.gradients_dtype or config.parallel.main_dtype
    params, gradient = DTYPE_BYTES[config.parallel.params_dtype], DTYPE_BYTES[dtype]
    ahead = [UnitPass(forward, params * numel) for (forward, _), numel in zip(seconds, elements, strict=True)]
    back = []
    for number in reversed(range(len(elements))):
        # The forward pass leaves the weights of the last unit on the device.
        numel, kept = elements[number], number == len(elements) - 1
        needed = (0 if kept else params * numel) + (gradient * numel if again else 0)
        back.append(UnitPass(seconds[number][1], needed, gradient * numel))
    found = exposed([*ahead, *back], rate)
    return sum(found[: len(ahead)]), sum(found[len(ahead) :])
