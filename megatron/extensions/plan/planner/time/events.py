"""Events and memory of one micro-batch in a part of a stage. This module does not import torch.

The events depend on the shapes of a rank's part of the model, but not on the device or on the placement of ranks. One
recording is therefore sufficient to predict the memory, the FLOPs and the times on all devices and under all
placements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Product:
    """`batches` matrix products [m, k] x [k, n]."""

    precision: str
    """Precision of the operands: bf16 (used for fp16 too), fp8, fp32 or fp64."""

    m: int
    n: int
    k: int
    batches: int = 1
    moved: int = 0
    """Bytes of the two operands and the result."""

    sums: int = 0
    """Bytes read and written when the product is added to existing fp32 sums; 0 if the product is not added."""

    expert: bool = False
    """True if the rows are tokens that a router sent to this rank."""

    again: bool = False
    """True if the product is recomputed for the backward pass."""

    at_one_time: int = 1
    """Number of products, including this one, that the device may compute concurrently."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One launch of a fused attention kernel."""

    backend: str
    """Name of the kernel: cudnn, flash, flash3, triton (the kernel with dropout), or auto (the device's fastest kernel
    without dropout). Kernels with a forward pass in fp8 are named fp8_flash3, fp8_triton, or fp8 (the faster of these
    two kernels).
    """

    width: int
    """Channels per head."""

    flops: float
    """FLOPs of the kernel: masked pairs are excluded, and scores recomputed in the backward pass are included."""

    length: int
    """Number of keys in the launch."""

    backward: bool

    hashes: float = 0.0
    """Number of dropout mask hashes that the kernel computes, one per query-key pair and pass."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """One launch of a kernel that gathers rows and multiplies each row by a few queries."""

    flops: float
    """FLOPs of the kernel, including recomputation."""

    read: float
    """Bytes of rows that the kernel gathers from the cache."""

    added: float = 0.0
    """Bytes of fp32 values that the kernel adds to rows in the cache. The order of these additions is not fixed."""


@dataclass(frozen=True, slots=True)
class Move:
    """Element-wise or fused kernel, described by the bytes that it reads and writes."""

    moved: int


@dataclass(frozen=True, slots=True)
class Collective:
    """Start of a collective over an axis of the rank mesh. A `Wait` event with the same `number` marks where the result
    of the collective is needed."""

    kind: str
    """Kind of the collective: all_reduce, all_gather, reduce_scatter, all_to_all, or send (to the next rank of the
    axis)."""

    moved: int
    """Bytes of the whole (unsharded) operand, which is the result of a gather, the input of a reduction, or the data
    that a rank sends."""

    axis: str
    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Point at which computation needs the result of a collective."""

    number: int


Kernel = Product | Attention | Gathered | Move
Event = Kernel | Collective | Wait


@dataclass(frozen=True)
class BufferCounts:
    """Numbers of buffers, keyed by the size of a buffer in bytes."""

    of_size: Mapping[int, int] = field(default_factory=dict)

    def __add__(self, more: BufferCounts) -> BufferCounts:
        sizes = {**self.of_size, **more.of_size}
        return BufferCounts({size: self.of_size.get(size, 0) + more.of_size.get(size, 0) for size in sizes})

    def __rmul__(self, factor: int) -> BufferCounts:
        return BufferCounts({size: factor * number for size, number in self.of_size.items()})


@dataclass(frozen=True)
class StageMemory:
    """Memory of one micro-batch on one stage, in bytes."""

    kept: int = 0
    """Bytes held from forward to backward: saved activations, and the input that the executor holds."""

    for_weights: int = 0
    """Bytes held between the two halves of a backward pass, I (input gradients) and W (weight gradients); 0 if the
    schedule does not split backward passes."""

    forward: int = 0
    """Peak number of bytes during a forward pass (F)."""

    backward: int = 0
    """Peak number of bytes during a backward pass (B) or its first half (I), including the saved activations."""

    weight: int = 0
    """Peak number of bytes during W (weight gradients), including the tensors that B or I kept for W."""

    weight_copies: int = 0
    """Bytes of fp8 weight copies, which are made once per step for all micro-batches."""

    offloaded: int = 0
    """Number of bytes that are offloaded to the host between the forward and the backward pass. `kept` does not include
    these bytes."""

    host: BufferCounts = field(default_factory=BufferCounts)
    """Numbers of host buffers that hold offloaded activations, by buffer size."""

    def __add__(self, more: StageMemory) -> StageMemory:
        return StageMemory(*(a + b for a, b in zip(vars(self).values(), vars(more).values(), strict=True)))

    def __mul__(self, factor: int) -> StageMemory:
        return StageMemory(*(factor * value for value in vars(self).values()))

    def __sub__(self, less: StageMemory) -> StageMemory:
        return self + less * -1


@dataclass(frozen=True)
class PassEvents:
    """Events and memory of one micro-batch in a part of a stage."""

    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    """Events of the backward pass. Weight gradients are included unless the schedule defers them."""

    weight: tuple[Event, ...] = ()
    """Events of deferred weight gradients (W of zero-bubble schedules)."""

    once: tuple[Event, ...] = ()
    """Events that occur only in the first micro-batch of a step, such as weight casts to fp8."""

    memory: StageMemory = StageMemory()

    @property
    def every(self) -> tuple[Event, ...]:
        """Events that occur in every micro-batch: forward pass, backward pass and deferred weight gradients."""
        return self.forward + self.backward + self.weight
