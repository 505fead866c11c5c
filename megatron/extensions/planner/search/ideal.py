"""Time that a device needs at least for what one sample adds to a micro-batch, over however many ranks. No torch.

Products fill every multiprocessor, at the rate of their inner dimension, or of an endless one where that grows with the
samples; nothing is launched, no kernel has a shortest time, and collectives take none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.extensions.planner.device_file import DeviceFile
from megatron.extensions.planner.time.events import Attention, Event, Move, PassEvents, Product


def ideal_seconds_of_a_sample(one: Sequence[PassEvents], two: Sequence[PassEvents], device: DeviceFile) -> float:
    """Seconds that the second sample adds, by what parts of a model do with one and with two samples. What they do once
    for all samples, as reading weights, is left out: in other layouts more samples share it."""
    device = replace(device, kernel_floor_us=0.0)
    first, second = _products(one), _products(two)
    alike = len(first) == len(second)
    pairs = list(zip(first, second, strict=True)) if alike else []
    products = sum(_product_us(b, a, device) - _product_us(a, b, device) for a, b in pairs)
    return 1e-6 * (max(0.0, products) + max(0.0, _others_us(two, device) - _others_us(one, device)))


def _events(parts: Sequence[PassEvents]) -> Iterator[Event]:
    return (event for part in parts for events in (part.forward, part.backward, part.weight) for event in events)


def _products(parts: Sequence[PassEvents]) -> list[Product]:
    return [event for event in _events(parts) if isinstance(event, Product)]


def _product_us(event: Product, other: Product, device: DeviceFile) -> float:
    """Microseconds of a product; `other` is the same one of another number of samples."""
    speed, flops = device.gemm[event.precision], 2.0 * event.batches * event.m * event.n * event.k
    filled = event.k / (event.k + speed.half_depth) if event.k == other.k else 1.0
    return flops / speed.tflops / filled / 1e6


def _others_us(parts: Sequence[PassEvents], device: DeviceFile) -> float:
    total = 0.0
    for event in _events(parts):
        if isinstance(event, Attention):
            total += device.attention_us(event.backend, event.width, event.flops, event.length, event.backward)
            total += device.hash_us(event.hashes)
        elif isinstance(event, Move):
            total += device.memory_us(event.moved)
    return total
