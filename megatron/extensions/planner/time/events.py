"""What a rank does in a pass through a layer, in order: products, attention, moved bytes and collectives. No torch.

A list of events depends on the shapes of a rank's part of the model alone, not on a device or on where ranks lie, so
that one list serves predictions for all devices and all placements of its groups.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Product:
    """`batches` matrix products [m, k] x [k, n]."""

    precision: str
    """bf16 (fp16 too), fp8, fp32 or fp64: of the operands."""

    m: int
    n: int
    k: int
    batches: int = 1
    moved: int = 0
    """Bytes of operands and result."""

    sums: int = 0
    """Bytes of fp32 sums that the product is added to, read and written."""

    expert: bool = False
    """Whether the rows are tokens that a router has sent here."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One launch of a fused attention kernel."""

    backend: str
    """cudnn, flash, flash3, triton (with dropout), or auto: the device's fastest without dropout."""

    width: int
    """Channels of a head."""

    flops: float
    """FLOPs that the kernel does: hidden pairs not counted, recomputed scores in the backward counted."""

    length: int
    """Keys of the launch."""

    backward: bool

    hashes: float = 0.0
    """Pairs whose mask of dropout the kernel hashes, each as often as it does so."""


@dataclass(frozen=True, slots=True)
class Move:
    """An element-wise kernel, or a fused one, by the bytes that it reads and writes."""

    moved: int


@dataclass(frozen=True, slots=True)
class Collective:
    """The start of a collective over an axis of the mesh. `Wait` with the same number completes it."""

    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all or send (to the next rank of the axis)."""

    moved: int
    """Bytes of the whole operand: what a gather results in, what a reduction reads, what a rank sends otherwise."""

    axis: str
    number: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The computation needs the result of a collective."""

    number: int


Event = Product | Attention | Move | Collective | Wait


@dataclass(frozen=True)
class PassEvents:
    """What one micro-batch does in a part of a stage."""

    forward: tuple[Event, ...] = ()
    backward: tuple[Event, ...] = ()
    """The gradient of the input, and of weights where the schedule does not defer them."""

    weight: tuple[Event, ...] = ()
    """Deferred gradients of weights (W of zero-bubble schedules)."""

    once: tuple[Event, ...] = ()
    """In the first micro-batch of a step alone: casts of weights to fp8."""

    offloaded: int = 0
    """Bytes copied to the host in the forward, and back in the backward."""
