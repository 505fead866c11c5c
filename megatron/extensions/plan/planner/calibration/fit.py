"""Fit the constants of a device file to measured times. This module does not import torch.

Each measured time is modeled as a linear combination of constants, which are fitted by least squares. The fit minimizes
relative errors, and no constant is negative. Constants that cannot be measured on single operations, such as the gap
between operations, are fitted to the times of whole steps (`fit_steps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import yaml

from megatron.extensions.plan.planner.device_file import AttentionSpeed, DeviceFile, GemmSpeed, Link
from megatron.extensions.plan.planner.time.events import Attention, Product
from megatron.extensions.plan.planner.time.replay import ROUNDS


@dataclass(frozen=True)
class CollectiveTime:
    """Measured time of a collective in seconds. `moved` is the size of the unsharded operand in bytes. `link` is `node`
    if all `size` ranks of the group are on one node, or `network` if each of them is on a different node."""

    link: str
    kind: str
    size: int
    moved: int
    seconds: float


@dataclass(frozen=True)
class Measured:
    """Measured times in seconds: either the times of one rank, or the means over all ranks."""

    products: tuple[tuple[Product, float], ...]
    attention: tuple[tuple[Attention, float], ...]
    moves: tuple[tuple[int, float], ...]
    """Pairs (bytes read and written, seconds) of copies."""

    floor: float
    """Time in seconds of an element-wise operation on a tensor with one element."""


def line(xs: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Fit the coefficients c of seconds = sum(c * x) by minimizing relative errors. The first coefficient is positive,
    and none is negative."""
    columns = np.asarray(xs, dtype=float) / np.asarray(seconds)[:, None]
    kept = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(columns[:, kept], np.ones(len(columns)), rcond=None)[0]
        if len(kept) == 1 or (found[0] > 0 and (found >= 0).all()):
            break
        shares = found * columns[:, kept].mean(0)
        # If the first coefficient is positive, drop the coefficient whose term has the most negative share of the time.
        # Otherwise, drop the coefficient whose term has the largest share, so that the first coefficient grows.
        kept.pop(1 + int(np.argmin(shares[1:]) if found[0] > 0 else np.argmax(shares[1:])))
    coefficients = [0.0] * columns.shape[1]
    for place, value in zip(kept, found, strict=True):
        coefficients[place] = float(value)
    return coefficients


def growth(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Return (seconds per byte, fixed seconds per message), fitted to messages of growing sizes. The time per byte is
    computed from the two largest messages alone, because networks transfer short bursts faster than their sustained
    rate."""
    last = len(sizes) - 1
    grown = (seconds[last] - seconds[last - 1]) / (sizes[last] - sizes[last - 1]) if last else 0.0
    per_byte = grown if grown > 0 else seconds[last] / sizes[last]
    return per_byte, max(0.0, median(took - per_byte * size for size, took in zip(sizes, seconds, strict=True)))


def gemm_speed(points: Sequence[tuple[Product, float]], filled: Sequence[float], peak: float = math.inf) -> GemmSpeed:
    """Fit the GEMM rate at one precision. `filled` contains, for each measured point, the share of the device that the
    product's output tiles fill. `peak` is the TFLOP/s that the device can reach. The fitted rate is limited to the
    peak, because noise, or shares that are too small, may yield a higher rate."""
    flops = [2.0 * each.m * each.n * each.k / full for (each, _), full in zip(points, filled, strict=True)]
    xs = [[flop, flop / each.k] for flop, (each, _) in zip(flops, points, strict=True)]
    per_flop, per_column = line(xs, [seconds for _, seconds in points])
    if (least := 1e-12 / peak) > per_flop:
        depths = [(took / flop / least - 1) * each.k for flop, (each, took) in zip(flops, points, strict=True)]
        return GemmSpeed(peak, max(0.0, median(depths)))
    return GemmSpeed(1e-12 / per_flop, per_column / per_flop)


def attention_speed(points: Sequence[tuple[Attention, float]]) -> tuple[float, float]:
    """Fit the rate of an attention kernel. Return a pair: the TFLOP/s in the limit of long sequences, and the sequence
    length at which the kernel reaches half of this rate."""
    xs = [[each.flops, each.flops / each.length] for each, _ in points]
    per_flop, per_row = line(xs, [seconds for _, seconds in points])
    return 1e-12 / per_flop, per_row / per_flop


def sent(point: CollectiveTime) -> float:
    """Return the number of bytes that each rank sends in a measured collective, counted as in
    `megatron.extensions.plan.planner.time.replay`."""
    rounds = ROUNDS.get(point.kind, 1.0)
    return point.moved if point.kind == "send" else rounds * point.moved * (point.size - 1) / point.size


def link(points: Sequence[CollectiveTime], ranks_per_adapter: float) -> Link:
    """Fit a link. `ranks_per_adapter` is the number of ranks that shared a network adapter during the measurement; it
    is 1 for the link within a node."""
    rates, starts = dict[str, float](), dict[str, float]()
    for kind in dict.fromkeys(each.kind for each in points):
        own = [each for each in points if each.kind == kind]
        per_byte, starts[kind] = growth([sent(each) for each in own], [each.seconds for each in own])
        rates[kind] = ranks_per_adapter * 1e-9 / per_byte
    best = rates["all_reduce"]
    size = points[0].size
    # An all-reduce takes twice as many steps as a gather, but both are launched once.
    steps = max(1, size - 1) if ranks_per_adapter == 1 else max(1, int(np.ceil(np.log2(size))))
    latency = (starts["all_reduce"] - starts["all_gather"]) / steps
    if latency <= 0:  # the times are too noisy, so attribute all of the all-reduce's time to its steps
        latency = starts["all_reduce"] / 2 / steps
    launch = max(0.0, starts["all_gather"] - latency * steps)
    share = {kind: _in_four_digits(rate / best) for kind, rate in rates.items() if kind != "all_reduce"}
    return Link(_in_four_digits(best), _in_four_digits(1e6 * latency), _in_four_digits(1e6 * launch), share)


def links_of(points: Sequence[CollectiveTime], ranks_per_node: int) -> dict[str, Link]:
    """Fit the link within a node and the link between nodes. All ranks of a node are assumed to share one network
    adapter."""
    found = {}
    for name in ("node", "network"):
        if own := [point for point in points if point.link == name]:
            found[name] = link(own, 1 if name == "node" else ranks_per_node)
    return found


def device_file(measured: Measured, filled: Mapping[tuple[int, int], float], **about: Any) -> DeviceFile:
    """Build a device file. `filled` maps the sizes (m, n) of a product to the share of a GPU that the product fills.
    For sizes that `filled` does not contain, this share is 1. `about` holds known fields of the device, such as
    `capability` for a GPU. `peak_tflops` defaults to the higher of two rates: the best measured rate, and the rate that
    the fit predicts for an infinite inner dimension."""
    peaks = about.get("peak_tflops", {})
    gemm = {}
    for precision in dict.fromkeys(each.precision for each, _ in measured.products):
        own = [point for point in measured.products if point[0].precision == precision]
        shares = [filled.get((each.m, each.n), 1.0) for each, _ in own]
        gemm[precision] = gemm_speed(own, shares, peaks.get(precision, math.inf))
    attention: dict[str, dict[int, AttentionSpeed]] = {}
    for kernel, width in dict.fromkeys((each.backend, each.width) for each, _ in measured.attention):
        of_kernel = [point for point in measured.attention if (point[0].backend, point[0].width) == (kernel, width)]
        both = [attention_speed([point for point in of_kernel if point[0].backward is way]) for way in (False, True)]
        attention.setdefault(kernel, {})[width] = AttentionSpeed(*both)
    per_byte, start = line([[moved, 1.0] for moved, _ in measured.moves], [seconds for _, seconds in measured.moves])
    best = {
        precision: max(
            speed.tflops, *(2e-12 * p.m * p.n * p.k / took for p, took in measured.products if p.precision == precision)
        )
        for precision, speed in gemm.items()
    }
    on_gpu = about.get("capability") is not None
    return DeviceFile(
        gemm=gemm,
        attention=attention,
        copy_tb_per_second=1e-12 / per_byte,
        kernel_floor_us=1e6 * measured.floor if on_gpu else 0.0,
        launch_gap_us=1.0 if on_gpu else 1e6 * start,
        host_launch_us=1e6 * measured.floor if on_gpu else 0.0,
        epilogue_exposed=0.5 if on_gpu else 1.0,
        adapters_per_node=1,
        **{"peak_tflops": best, **about},
    )


def errors(device: DeviceFile, measured: Measured) -> dict[str, float]:
    """Return the median relative error of the device file's predictions, keyed by measured quantity."""
    found: dict[str, list[float]] = {}

    def note(what: str, us: float, seconds: float) -> None:
        found.setdefault(what, []).append(abs(1e-6 * us - seconds) / seconds)

    for p, seconds in measured.products:
        note(f"products {p.precision}", device.gemm_us(p.precision, p.m, p.n, p.k), seconds)
    for a, seconds in measured.attention:
        way = "backward" if a.backward else "forward"
        us = device.attention_us(a.backend, a.width, a.flops, a.length, a.backward)
        note(f"attention {a.backend} {way}", us, seconds)
    # The copy rates of CPUs are fitted to whole steps, because caches behave differently in isolated operations.
    if device.capability is not None:
        for moved, seconds in measured.moves:
            note("element-wise", device.memory_us(moved), seconds)
    return {what: median(values) for what, values in found.items()}


def text_of(device: DeviceFile, remarks: Iterable[str]) -> str:
    """Format a device file as YAML, with `remarks` as comments at the top."""
    entries = {name: _rounded(value) for name, value in asdict(device).items() if value is not None}
    text: str = yaml.safe_dump(entries, sort_keys=False, default_flow_style=None, width=120)
    return "".join(f"# {remark}\n" for remark in remarks) + text


def _rounded(value: object) -> object:
    """Round numbers to four significant digits."""
    if isinstance(value, Mapping):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return _in_four_digits(value) if isinstance(value, float) else value


def _in_four_digits(number: float) -> float:
    return float(f"{number:.4g}")


Predict = Callable[[DeviceFile], float]
"""Function that predicts the step time of a measured run on a device, in seconds."""


def fit_steps(device: DeviceFile, steps: Sequence[tuple[Predict, float]]) -> DeviceFile:
    """Return a copy of `device` with the bandwidth, the gap between operations and the step overhead that best fit the
    measured step times. On GPUs, only the step overhead is fitted, because the bandwidth is known from separately timed
    copies."""
    alone = replace(device, copy_tb_per_second=1e9, launch_gap_us=0.0, step_overhead_ms=0.0, kernel_floor_us=0.0)
    fixed = [predict(alone) for predict, _ in steps]
    rows = [
        [
            predict(replace(alone, copy_tb_per_second=device.copy_tb_per_second)) - base,
            predict(replace(alone, launch_gap_us=1.0)) - base,
            1e-3,
        ]
        for (predict, _), base in zip(steps, fixed, strict=True)
    ]
    left = [max(1e-9, seconds - base) for (_, seconds), base in zip(steps, fixed, strict=True)]
    if device.capability is not None:
        rest = [seconds - predict(replace(device, step_overhead_ms=0.0)) for predict, seconds in steps]
        return replace(device, step_overhead_ms=max(0.0, 1e3 * min(rest)))
    moved, gap, overhead = line(rows, left)
    return replace(
        device,
        copy_tb_per_second=device.copy_tb_per_second / moved if moved else device.copy_tb_per_second,
        launch_gap_us=gap,
        step_overhead_ms=overhead,
        kernel_floor_us=0.0,
    )
