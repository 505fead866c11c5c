"""Speeds of one kind of device, read from `devices/*.yaml`, and the times that they predict for a kernel.

Every time is a prediction. A GEMM reaches its precision's rate, less for a short inner dimension and for a last wave
that does not fill the device; attention reaches the rate of its kernel; everything else moves bytes at the bandwidth of
a copy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "devices"

TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
"""Output tiles that GEMM kernels choose from."""


@dataclass(frozen=True)
class GemmSpeed:
    """Rate of the GEMMs of one precision."""

    tflops: float
    """TFLOP/s of an endless inner dimension, with all multiprocessors busy."""

    half_depth: float
    """Inner dimension at which half of that is reached: the time of filling and emptying a tile's pipeline."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Rates of one attention kernel for one head size, in FLOPs that it does: half of the square for causal attention,
    and five products in the backward, which computes the scores again. Each is (TFLOP/s of an endless sequence,
    sequence length at which half of that is reached)."""

    forward: tuple[float, float]
    backward: tuple[float, float]


@dataclass(frozen=True)
class DeviceFile:
    """One kind of device."""

    name: str
    """As `torch.cuda.get_device_name` says it."""

    capability: tuple[int, int]
    """CUDA compute capability."""

    multiprocessors: int
    memory_gib: float
    cache_mib: float
    """L2 cache."""

    shared_memory_kib: int
    """Largest shared memory of a block."""

    peak_tflops: Mapping[str, float]
    """By precision, from the data sheet: for MFU."""

    gemm: Mapping[str, GemmSpeed]
    """By precision: bf16, fp8, fp32."""

    attention: Mapping[str, Mapping[int, AttentionSpeed]]
    """By kernel (cudnn, flash for FlashAttention-2, flash3) and head size."""

    copy_tb_per_second: float
    """Bytes read and written per second of a large copy, in TB/s."""

    kernel_floor_us: float
    """Shortest time of a kernel."""

    launch_gap_us: float
    """Time between two kernels of a stream whose launches are queued."""

    host_launch_us: float
    """Time that the host takes for one operation. A step is bound by the host where this adds up to more."""

    epilogue_exposed: float
    """Share of the time of reading and writing the sums that a GEMM adds to (beta = 1) that products do not hide."""

    def memory_us(self, size: float) -> float:
        """Time of a kernel that reads and writes `size` bytes."""
        return max(self.kernel_floor_us, size / self.copy_tb_per_second / 1e6)

    def gemm_us(self, precision: str, m: int, n: int, k: int, batches: int = 1) -> float:
        """Time of `batches` products [m, k] x [k, n], by the output tile that suits them best."""
        speed = self.gemm[precision]
        rate = speed.tflops * k / (k + speed.half_depth)
        us = 2.0 * batches * m * n * k / rate / 1e6
        return max(self.kernel_floor_us, us / max(self._filled(m, n, batches, tile) for tile in TILES))

    def _filled(self, m: int, n: int, batches: int, tile: tuple[int, int]) -> float:
        """Share of the multiprocessors' time that goes into results: the last wave and the edges waste some, and small
        tiles load their operands more often."""
        rows, columns = tile
        tiles = batches * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / self.multiprocessors)
        reuse = min(1.0, (rows * columns / (rows + columns)) / (128 * 256 / (128 + 256)))
        return reuse**0.5 * batches * m * n / (waves * self.multiprocessors * rows * columns)

    def attention_us(self, kernel: str, width: int, flops: float, length: int, backward: bool) -> float:
        """Time of attention over `length` tokens by heads of size `width`, at the rates of the size next to it;
        `flops` are the kernel's own."""
        if kernel not in self.attention:
            raise ValueError(f"{self.name}: no speed of {kernel} attention; known are {', '.join(self.attention)}")
        of_widths = self.attention[kernel]
        speed = of_widths[min(of_widths, key=lambda known: abs(known - width))]
        endless, half = speed.backward if backward else speed.forward
        return max(self.kernel_floor_us, flops / (endless * length / (length + half)) / 1e6)


def device_names() -> list[str]:
    """Names of the device files."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_device(name: str) -> DeviceFile:
    """Reads `devices/NAME.yaml`, or the file whose path is `name`. Raises ValueError for an incomplete file."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(f"there is no device {name}; those that are known: {', '.join(device_names())}")
    values: dict[str, Any] = yaml.safe_load(path.read_text())
    _check(path, DeviceFile, values)
    values["gemm"] = {name: _read(path, GemmSpeed, row) for name, row in values["gemm"].items()}
    values["attention"] = {
        kernel: {width: _read(path, AttentionSpeed, row) for width, row in rows.items()}
        for kernel, rows in values["attention"].items()
    }
    major, minor = values["capability"]
    return DeviceFile(**{**values, "capability": (major, minor)})


def _read(path: Path, kind: Any, row: Mapping[str, Any]) -> Any:
    _check(path, kind, row)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})


def _check(path: Path, kind: Any, values: Mapping[str, Any]) -> None:
    known = {each.name for each in fields(kind)}
    if missing := sorted(known - set(values)):
        raise ValueError(f"{path}: {', '.join(missing)} is missing")
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{path}: {', '.join(unknown)} is not one of {', '.join(sorted(known))}")
