"""Kernels, the groups they belong to, and sums of them. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatron.extensions.planner.device_file import DeviceFile


@dataclass(frozen=True)
class Gemm:
    """`batches` products [m, k] x [k, n]."""

    precision: str
    batches: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> float:
        return 2.0 * self.batches * self.m * self.n * self.k


@dataclass(frozen=True)
class AttentionWork:
    """Causal attention of one direction."""

    kernel: str
    flops: float
    """That the kernel does: five products in the backward."""

    width: int
    """Head size."""

    length: int
    backward: bool


@dataclass(frozen=True)
class Kernel:
    """What one kernel does. Bytes."""

    group: str
    name: str
    read: int
    written: int
    work: Gemm | AttentionWork | None = None
    launches: int = 1
    """0 for a part of another kernel."""

    @property
    def flops(self) -> float:
        return self.work.flops if self.work is not None else 0.0

    def predicted_us(self, device: DeviceFile) -> float:
        """Time on `device`, without the gap before it."""
        match self.work:
            case Gemm(precision, batches, m, n, k):
                product = device.gemm_us(precision, m, n, k, batches)
                return max(product, device.memory_us(self.read + self.written))
            case AttentionWork(kernel, flops, width, length, backward):
                return device.attention_us(kernel, width, flops, length, backward)
        if not self.launches:
            return device.epilogue_exposed * (self.read + self.written) / device.copy_tb_per_second / 1e6
        return max(device.memory_us(self.read + self.written), self.launches * device.kernel_floor_us)


GROUPS = (
    "GEMMs",
    "weight-gradient sums",
    "residual addends",
    "attention",
    "norm",
    "residual adds",
    "activation",
    "rotary, copies",
    "fp8 casts",
    "fp8 transposes",
    "fp8 weight-gradient adds",
    "experts",
    "loss",
    "embedding",
    "optimizer",
    "communication",
    "other",
)
"""In the order of a table."""

ELEMENTWISE = ("norm", "residual adds", "activation", "rotary, copies", "experts", "other")
"""What a layer does beside GEMMs and attention in every precision."""

OF_FP8 = ("fp8 casts", "fp8 transposes", "fp8 weight-gradient adds")

FILES = {
    "core/transformer/norm": "norm",
    "core/transformer/rotary": "rotary, copies",
    "core/transformer/self_attention": "rotary, copies",
    "core/transformer/split_heads": "rotary, copies",
    "extensions/latent_attention": "rotary, copies",
    "core/transformer/activations": "activation",
    "core/transformer/mlp": "activation",
    "core/transformer/layer": "residual adds",
    "core/attention": "attention",
    "extensions/fp8": "fp8 casts",
    "core/moe": "experts",
    "core/tensor_parallel/cross_entropy": "loss",
    "core/tensor_parallel/vocabulary": "embedding",
    "core/tensor_parallel/weight_grad": "embedding",
    "core/models/gpt/loss": "loss",
    "core/models/gpt": "embedding",
    "core/optimizer": "optimizer",
    "core/distributed": "optimizer",
    "training": "other",
}
"""Start of a file's path within the library -> group of the operations that it calls."""

OPERATIONS = {
    "_index_put_impl_": "embedding",
    "embedding": "embedding",
    "add": "residual adds",
    "cat": "rotary, copies",
    "clone": "rotary, copies",
    "_to_copy": "rotary, copies",
    "copy_": "rotary, copies",
    "slice_backward": "rotary, copies",
    "gelu_backward": "activation",
    "silu_backward": "activation",
    "_softmax_backward_data": "experts",
    "scatter_add": "experts",
}
"""Groups of operations that autograd calls."""

REGIONS = {
    "transposed": "fp8 transposes",
    "fp8": "fp8 casts",
    "quantiz": "fp8 casts",
    "cast": "fp8 casts",
    "amax": "fp8 casts",
    "cross_entropy": "loss",
    "activations": "activation",
    "swiglu": "activation",
    "norm": "norm",
    "residual": "norm",
    "split_heads": "rotary, copies",
    "rotary": "rotary, copies",
    "rotate": "rotary, copies",
    "attention": "rotary, copies",
    "optimizer": "optimizer",
    "moe": "experts",
}
"""Part of the name of a region or of a kernel of our own -> group; the first that fits."""


def group_of_region(name: str) -> str:
    lower = name.lower()
    return next((group for part, group in REGIONS.items() if part in lower), "other")


def group_of_op(namespace: str, name: str, site: tuple[str, str]) -> str:
    """Group of an operation called at (file, function), for those that are no GEMM, attention or norm."""
    if namespace == "megatron":
        return group_of_region(name)
    if namespace in ("c10d", "_c10d_functional", "symm_mem"):
        return "communication"
    if "norm" in name and "foreach" not in name and "vector" not in name:
        return "norm"
    file = site[0]
    if name == "_index_put_impl_" and "moe" not in file:
        return "embedding"
    if found := next((group for start, group in FILES.items() if file.startswith(start)), None):
        return found
    return OPERATIONS.get(name, "other")


@dataclass
class Sums:
    """Of kernels. Bytes, FLOPs and predicted microseconds; a linear combination of steps may hold parts of a launch."""

    launches: float = 0.0
    read: float = 0.0
    written: float = 0.0
    flops: float = 0.0
    us: float = 0.0

    @property
    def moved(self) -> float:
        return self.read + self.written

    def plus(self, other: Sums, factor: float = 1.0) -> Sums:
        return Sums(*(a + factor * b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


Table = dict[tuple[str, str], Sums]
"""(group, kernel) -> sums."""


def table_of(kernels: Mapping[Kernel, int], device: DeviceFile) -> Table:
    """Sums by group and name."""
    found: Table = defaultdict(Sums)
    for kernel, count in kernels.items():
        gap = kernel.launches * device.launch_gap_us
        one = Sums(kernel.launches, kernel.read, kernel.written, kernel.flops, kernel.predicted_us(device) + gap)
        found[kernel.group, kernel.name] = found[kernel.group, kernel.name].plus(one, count)
    return dict(found)


def combined(parts: Iterable[tuple[Table, float]]) -> Table:
    """The sum of tables, each times a factor, without what cancels."""
    found: Table = defaultdict(Sums)
    for table, factor in parts:
        for key, sums in table.items():
            found[key] = found[key].plus(sums, factor)
    return {key: sums for key, sums in found.items() if any(abs(value) > 1e-6 for value in vars(sums).values())}


def total(table: Table, groups: Iterable[str] = GROUPS) -> Sums:
    """Of some groups."""
    wanted, whole = set(groups), Sums()
    for (group, _), sums in table.items():
        if group in wanted:
            whole = whole.plus(sums)
    return whole
