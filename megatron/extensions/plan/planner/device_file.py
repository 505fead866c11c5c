"""Read device files (`devices/*.yaml`), each with the speeds of one kind of device, and predict kernel times from these
speeds.

All times that this module returns are predictions. A GEMM is predicted to run at the rate for its precision. This rate
is reduced if the inner dimension is short, or if the last wave of tiles does not fill the device. Attention runs at the
rate of its attention kernel. Every other kernel takes the time of a copy of the same number of bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from megatron.training.config.yaml_text import compose_yaml, load_yaml, read_yaml_file

FOLDER = Path(__file__).parent / "devices"

TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (256, 64), (64, 128), (128, 64), (64, 64))
"""Output tile shapes among which a GEMM kernel chooses."""

ABOVE_0 = lambda value: value > 0, "{:g} must be above 0"
"""Condition and message for device file entries that must be above 0, because predictions divide by them."""

SHARE = lambda value: value <= 1, "{:g} must be a share of at most 1"
"""Condition and message for device file entries that are shares of a whole. A share above 1 was probably entered as a
percentage."""

Rate = Annotated[float, (ABOVE_0[0], "its TFLOP/s must be above 0")]
Positive = Annotated[float, ABOVE_0]
PositiveInt = Annotated[int, ABOVE_0]

COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send")

Kind = Annotated[str, (COLLECTIVES.__contains__, f"{{}} is not one of {', '.join(COLLECTIVES)}")]

HASH_OPERATIONS = 9
"""Number of integer operations that compute the dropout mask of one attention weight with a hash, and apply the
mask."""


class DeviceError(ValueError):
    """Exception raised if a device file lacks an entry that the prediction of a step needs."""


@dataclass(frozen=True)
class GemmSpeed:
    """GEMM rate at one precision."""

    tflops: Positive
    """TFLOP/s for an infinite inner dimension, with all multiprocessors busy."""

    half_depth: float
    """Inner dimension k of a product [m, k] x [k, n] at which the product reaches half of `tflops`. This value reflects
    the time to fill and drain the pipeline of a tile."""


@dataclass(frozen=True)
class AttentionSpeed:
    """Rates of one attention kernel for one head size. The rates count the FLOPs that the kernel executes: half of the
    s x s scores for causal attention, and five matrix products in the backward pass, which recomputes the scores. Each
    rate is a pair: the TFLOP/s for an infinitely long sequence, and the sequence length at which half of this rate is
    reached."""

    forward: tuple[Rate, float]
    backward: tuple[Rate, float]


@dataclass(frozen=True)
class GatherSpeed:
    """Rates of kernels that gather rows of a tensor and multiply them by other operands. The time of a kernel is the
    time of its products, of its reads or of its additions, whichever is longest."""

    tflops: Positive
    read_tb_per_second: Positive
    """Rate, in TB/s, at which rows are read from the L2 cache."""
    add_tb_per_second: Positive
    """Rate of atomic fp32 additions in the L2 cache, in TB/s."""


@dataclass(frozen=True)
class Link:
    """Link between ranks: within one node (`node`), or between nodes through all adapters of a node (`network`)."""

    gb_per_second: Positive
    """Rate in one direction in GB/s: per rank within a node, per adapter between nodes. Enter the rate that collectives
    with large operands reach, not the rate in the data sheet."""

    latency_us: float = 0.0
    """Latency of each step of a collective in microseconds, in addition to the transfer time."""

    launch_us: float = 0.0
    """Time to start a collective, in microseconds."""

    share: Mapping[Kind, Positive] = field(default_factory=dict)
    """Share of the link's rate that each kind of collective reaches. A kind of collective that is not listed reaches
    the full rate of the link."""


@dataclass(frozen=True)
class DeviceFile:
    """Description of one kind of device, and of a node with devices of this kind. Device files of CPUs omit the fields
    that describe GPUs."""

    name: str
    """Name of the device, as returned by `torch.cuda.get_device_name`."""

    multiprocessors: PositiveInt
    """Number of streaming multiprocessors (SMs) of a GPU. Device files of CPUs set this number to 1, because CPUs do
    not compute products in waves of tiles."""

    memory_gib: Positive

    peak_tflops: Mapping[str, float]
    """Peak TFLOP/s by precision, from the data sheet. The MFU is computed from these rates."""

    gemm: Mapping[str, GemmSpeed]
    """GEMM rates by precision: bf16, fp8, fp32."""

    attention: Mapping[str, Mapping[int, AttentionSpeed]]
    """Attention rates by kernel and head size. The kernels are cudnn, flash (FlashAttention-2), flash3, fp8_flash3 and
    fp8_triton. The two fp8 kernels run the backward pass in 16 bits."""

    copy_tb_per_second: Positive
    """Bytes read and written per second by a large copy, in TB/s."""

    kernel_floor_us: float
    """Minimum time of a kernel, in microseconds."""

    launch_gap_us: float
    """Gap in microseconds between two consecutive kernels of a stream if both launches are already queued."""

    host_launch_us: float
    """Host time to launch one operation, in microseconds. A step is host-bound if the host time of all operations
    exceeds the device time."""

    epilogue_exposed: Annotated[float, SHARE]
    """Exposed share of the time in which a GEMM with beta = 1 reads and writes its accumulator. The rest of this time
    overlaps with the products."""

    gather: GatherSpeed | None = None
    """Rates of kernels that gather rows. By default, products run at half of the bf16 product rate, reads at the copy
    rate, and additions at half of the copy rate.
    """

    capability: tuple[int, int] | None = None
    """CUDA compute capability; None for a CPU."""

    cache_mib: float = 0.0
    """Size of the L2 cache of a GPU in MiB."""

    shared_memory_kib: int = 0
    """Maximum size of the shared memory of a thread block in KiB."""

    links: Mapping[str, Link] = field(default_factory=dict)
    """Links by name: `node` within a node, and `network` between nodes. A plan for one rank needs no links."""

    ranks_per_node: PositiveInt = 8
    """GPUs per node, used if --gpus-per-node is not given."""

    adapters_per_node: PositiveInt = 8
    """Number of network adapters that the ranks of a node share."""

    sustained: Annotated[float, ABOVE_0, SHARE] = 1.0
    """Rates of matrix products and attention within a whole step, as a share of the rates of isolated kernels. A step
    keeps the device at its power limit, so the device's clock rates are lower than while isolated kernels run."""

    sustained_fp8: Annotated[float, ABOVE_0, SHARE] | None = None
    """Rate of fp8 products within a whole step, as a share of the rate of isolated fp8 products. If None, `sustained`
    applies. fp8 products need less energy per byte of operands than other products, so the device's clock rates drop
    less."""

    overlap_slowdown: float = 0.0
    """Time by which a hidden collective delays concurrent computation, as a share of the collective's time."""

    step_overhead_ms: float = 0.0
    """Part of the step time, in milliseconds, that does not depend on shapes: data loading, metrics, and host work
    between steps."""

    ranks_overhead_ms: float = 0.0
    """Additional fixed time of a step with several ranks, in milliseconds. At the end of a step, all ranks wait for the
    slowest rank and its host."""

    host_gb_per_second: Positive = 25.0
    """Copy rate, in GB/s, between the device and its host's memory, for offloading."""

    host_update_gb_per_second: Positive | None = None
    """Combined memory bandwidth, in GB/s, of all host cores of a rank while they update optimizer states. By default,
    this rate equals the copy rate."""

    disk_gb_per_second: Positive = 3.0
    """Rate per device, in GB/s, at which memory-mapped files on a local disk are read and written."""

    host_memory_gib: Positive | None = None
    """Host memory in GiB that is available per device; None if it is not known. Offloaded tensors must fit in this
    memory."""

    @property
    def device_type(self) -> str:
        """Name of the device type in torch, `cuda` or `cpu`."""
        return "cpu" if self.capability is None else "cuda"

    def ranks_of_node(self, world_size: int) -> int:
        """Return the default number of ranks per node. The default is `ranks_per_node` or, if the world needs several
        nodes, the largest divisor of the world size that is at most `ranks_per_node`."""
        most = self.ranks_per_node
        return most if world_size <= most else next(size for size in range(most, 0, -1) if world_size % size == 0)

    def fixed_ms(self, world_size: int) -> float:
        """Return the part of the step time, in milliseconds, that does not depend on shapes."""
        return self.step_overhead_ms + (self.ranks_overhead_ms if world_size > 1 else 0.0)

    def memory_us(self, size: float) -> float:
        """Return the time in microseconds of a kernel that reads and writes `size` bytes in total."""
        return max(self.kernel_floor_us, size / self.copy_tb_per_second / 1e6)

    def gemm_us(self, precision: str, m: int, n: int, k: int, batches: int = 1) -> float:
        """Return the time in microseconds of `batches` products [m, k] x [k, n] with the fastest output tile.
        Matrix-vector products use kernels without tiles."""
        speed = self._gemm_speed(precision)
        rate = speed.tflops * k / (k + speed.half_depth)
        share = 1.0 if self.device_type == "cpu" or 1 in (m, n) else tile_share(m, n, self.multiprocessors, batches)
        return max(self.kernel_floor_us, 2.0 * batches * m * n * k / rate / 1e6 / share)

    def sustained_share(self, precision: str) -> float:
        """Return the rate of matrix products within a whole step, as a share of the rate of isolated products at the
        same precision."""
        own = self.sustained_fp8 if precision == "fp8" else None
        return self.sustained if own is None else own

    def _gemm_speed(self, precision: str) -> GemmSpeed:
        if precision == "fp64" and precision not in self.gemm:
            precision = "fp32"
        if precision not in self.gemm:
            raise DeviceError(f"{self.name}: no speed of {precision} products; known are {', '.join(self.gemm)}")
        return self.gemm[precision]

    def attention_us(self, kernel: str, width: int, flops: float, length: int, backward: bool) -> float:
        """Return the time in microseconds of attention over `length` tokens with heads of size `width`. The rates are
        those of the nearest head size in the device file. `flops` is the number of FLOPs that the kernel itself
        executes."""
        if kernel == "auto":  # use the fastest of torch's kernels, or any available kernel on other devices
            suited = [name for name in ("cudnn", "flash") if name in self.attention] or list(self.attention)
            return min(self.attention_us(name, width, flops, length, backward) for name in suited)
        if kernel == "triton" and kernel not in self.attention:
            # The triton kernel's matrix products are assumed to be as fast as those of `kernel`.
            kernel = "flash" if "flash" in self.attention else "auto"
            return self.attention_us(kernel, width, flops, length, backward)
        if kernel == "fp8" and (in_fp8 := [name for name in self.attention if name.startswith("fp8_")]):
            return min(self.attention_us(name, width, flops, length, backward) for name in in_fp8)
        if kernel not in self.attention:
            raise DeviceError(f"{self.name}: no speed of {kernel} attention; known are {', '.join(self.attention)}")
        of_widths = self.attention[kernel]
        speed = of_widths[min(of_widths, key=lambda known: abs(known - width))]
        endless, half = speed.backward if backward else speed.forward
        return max(self.kernel_floor_us, flops / (endless * length / (length + half)) / 1e6)

    def gather_us(self, flops: float, read: float, added: float) -> float:
        """Return the time in microseconds of a kernel that gathers `read` bytes of rows and adds `added` bytes to
        rows."""
        copy = self.copy_tb_per_second
        speed = self.gather or GatherSpeed(self._gemm_speed("bf16").tflops / 2, copy, copy / 2)
        times = flops / speed.tflops, read / speed.read_tb_per_second, added / speed.add_tb_per_second
        return max(self.kernel_floor_us, max(times) / 1e6)

    def hash_us(self, pairs: float) -> float:
        """Return the time in microseconds that an attention kernel spends on hashing dropout masks for `pairs`
        query-key pairs. Hashing does not overlap with matrix products. The rate of integer operations is assumed to be
        a quarter of the fp32 FLOP rate."""
        return pairs * HASH_OPERATIONS / (self._gemm_speed("fp32").tflops / 4) / 1e6 if pairs else 0.0


def tile_share(m: int, n: int, multiprocessors: int, batches: int = 1) -> float:
    """Return the efficiency, at most 1, at which a GPU computes a product of size [m, n] with the best output tile. The
    last wave and the edge tiles use the GPU only in part, and small tiles load the operands more often."""

    def filled(rows: int, columns: int) -> float:
        tiles = batches * math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / multiprocessors)
        reuse = min(1.0, (rows * columns / (rows + columns)) / (128 * 256 / (128 + 256)))
        return reuse**0.5 * batches * m * n / (waves * multiprocessors * rows * columns)

    return max(filled(*tile) for tile in TILES)


MOST_OF_PEAK = 2.0
"""Largest allowed ratio of a fitted rate to the peak rate in a device file. A fitted rate may exceed the peak: the
fitted rate applies to infinitely large products, whereas the peak may be a rate that was measured with a finite
product."""


def device_names() -> list[str]:
    """Return the names of the device files that the planner provides."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_device(name: str) -> DeviceFile:
    """Read `devices/NAME.yaml`, or the file whose path is `name`. Raises ValueError if the file is incomplete or has a
    value of the wrong type, and OSError if it cannot be read."""
    path = Path(name) if name.endswith(".yaml") else FOLDER / f"{name}.yaml"
    if not path.is_file():
        raise ValueError(_why_no_file(name))
    try:
        text = read_yaml_file(path)
        node, values = compose_yaml(text), load_yaml(text)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from None
    _check_keys(str(path), node)
    found: DeviceFile = _read(str(path), DeviceFile, values)
    for precision, peak in found.peak_tflops.items():
        speed = found.gemm.get(precision)
        if peak == 0 or (speed is not None and speed.tflops > MOST_OF_PEAK * peak):
            rates = (
                f"of which gemm: {precision}: tflops: {speed.tflops:g} would be too much" if speed else "which is none"
            )
            raise ValueError(f"{path}: peak_tflops: {precision}: {peak:g}, {rates}: MFU is relative to it")
    if not found.attention:
        raise ValueError(f"{path}: attention: must name a kernel, such as flash")
    if empty := [kernel for kernel, speeds in found.attention.items() if not speeds]:
        raise ValueError(f"{path}: attention: {empty[0]}: must have the rates of a head size, or be left out")
    return found


def _why_no_file(name: str) -> str:
    if Path(name).is_dir():
        return f"{name} is a folder"
    if Path(name).is_file():
        return f"{name} must end in .yaml, like every device file"
    if name.endswith(".yaml"):
        return f"no such file: {name}"
    return f"there is no device {name}; known devices: {', '.join(device_names())}"


def _check_keys(place: str, node: Any) -> None:
    """Raise ValueError if a mapping of YAML nodes has a duplicate key, because YAML would silently keep the last
    value."""
    pairs = node.value if node is not None and node.id == "mapping" else ()
    lines: dict[str, int] = {}
    for key, value in pairs:
        line = key.start_mark.line + 1
        if str(key.value) in lines:
            raise ValueError(f"{place}: {key.value} appears twice, in lines {lines[key.value]} and {line}")
        lines[str(key.value)] = line
        _check_keys(f"{place}: {key.value}", value)


def _read(place: str, kind: Any, value: Any) -> Any:
    """Convert a YAML value to `kind`, the type of a field. Raises a ValueError that names the entry `place`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return None if value is None else _read(place, parts[0], value)
    if origin is Annotated:
        found = _read(place, parts[0], value)
        for holds, rule in parts[1:]:
            if not holds(found):
                raise ValueError(f"{place}: {rule.format(found)}")
        return found
    if is_dataclass(kind) or origin is Mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{place}: {value!r} must consist of named entries")
        if origin is Mapping:
            return {_read(place, parts[0], key): _read(f"{place}: {key}", parts[1], row) for key, row in value.items()}
        return _read_entries(place, kind, value)
    if origin is tuple:
        if not isinstance(value, list) or len(value) != len(parts):
            raise ValueError(f"{place}: {value!r} must be a list of {len(parts)} numbers")
        return tuple(_read(place, part, each) for part, each in zip(parts, value, strict=True))
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{place}: {value!r} must be a word")
        return value
    if kind is float and isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 parses 8e2 as text
            value = float(value)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{place}: {value} must be finite")
    if isinstance(value, bool) or not isinstance(value, (int, kind)) or value < 0:
        raise ValueError(f"{place}: {value!r} must be a {'whole ' if kind is int else ''}number of at least 0")
    return value


def _read_entries(place: str, kind: Any, values: Mapping[str, Any]) -> Any:
    known, types = {each.name: each for each in fields(kind)}, get_type_hints(kind, include_extras=True)
    optional = {name for name, each in known.items() if (each.default, each.default_factory) != (MISSING, MISSING)}
    if missing := sorted(set(known) - optional - set(values)):
        raise ValueError(f"{place}: {', '.join(missing)} is missing")
    if unknown := sorted(map(str, set(values) - set(known))):
        raise ValueError(f"{place}: {', '.join(unknown)} is not one of {', '.join(sorted(known))}")
    return kind(**{name: _read(f"{place}: {name}", types[name], value) for name, value in values.items()})
