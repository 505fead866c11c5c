"""Measure the times of matrix products, attention, element-wise operations and collectives on this machine.

All ranks measure the same operation at the same time, as in training. Ranks that share processors, memory or a network
cable slow each other down, and a measurement must include this effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.collectives import start_all_gather, start_reduce_scatter
from megatron.core.parallel_state import Axis
from megatron.extensions.plan.planner.calibration.fit import CollectiveTime, Measured
from megatron.extensions.plan.planner.device_file import COLLECTIVES as KINDS
from megatron.extensions.plan.planner.time.events import Attention, Product

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


@dataclass(frozen=True)
class Sizes:
    """Sizes to measure: small on a CPU, which trains only small models, and large on a GPU."""

    products: tuple[tuple[int, int, int], ...]
    """Sizes (m, n, k) of matrix products [m, k] x [k, n]. The size m corresponds to the number of tokens."""

    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    """Shapes [rows, columns] of element-wise operations."""

    columns: int
    messages: tuple[int, ...]
    """Sizes in bytes of the unsharded operands with which collectives are measured."""


CPU = Sizes(
    products=tuple(
        (m, n, k) for m in (128, 512) for n, k in ((128, 256), (256, 128), (256, 1024), (1024, 256), (768, 256))
    ),
    lengths=(128, 256, 512),
    widths=(32, 64),
    rows=(128, 512, 2048),
    columns=512,
    messages=(4096, 65536, 524288, 2097152, 8388608),
)
GPU = Sizes(
    products=tuple(
        (m, n, k) for m in (2048, 8192) for n, k in ((1024, 4096), (4096, 1024), (4096, 4096), (16384, 4096))
    ),
    lengths=(1024, 2048, 8192),
    widths=(64, 128),
    rows=(2048, 8192, 32768),
    columns=4096,
    messages=(65536, 1 << 20, 1 << 24, 1 << 27),
)


class Clock:
    """Timer for calls that all ranks make at the same time, in rounds of many repetitions."""

    def __init__(self, device: torch.device, round_seconds: float, rounds: int = 3) -> None:
        self.device = device
        self.round_seconds = round_seconds
        self.rounds = rounds
        self.world = dist.get_world_size() if dist.is_initialized() else 1

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the median time of a call over several rounds, averaged over the ranks."""
        self._timed(call, 1)  # the first call allocates memory
        once = self.agreed(self._timed(call, 2) / 2)
        count = max(2, int(self.round_seconds / max(once, 1e-7)))
        return self.agreed(median(self._timed(call, count) / count for _ in range(self.rounds)))

    def _timed(self, call: Callable[[], object], count: int) -> float:
        if self.world > 1:
            dist.barrier()
        start = time.perf_counter()
        for _ in range(count):
            call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def agreed(self, seconds: float) -> float:
        """Average a time over the ranks, so that all ranks make the same number of calls."""
        if self.world == 1:
            return seconds
        mine = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine)
        return float(mine) / self.world


def measure(clock: Clock, sizes: Sizes, precisions: Sequence[str]) -> Measured:
    """Measure one device. All ranks must call this function together."""
    return Measured(
        products=tuple(products(clock, sizes, precisions)),
        attention=tuple(attention(clock, sizes, precisions[-1])),
        moves=tuple(moves(clock, sizes)),
        floor=clock.seconds(partial(torch.ones(1, device=clock.device).add_, 1.0)),
    )


def measure_links(clock: Clock, sizes: Sizes, ranks_per_node: int) -> tuple[list[CollectiveTime], float]:
    """Return two values: a list with the times of collectives within and between nodes, and the result of
    `overlap_slowdown`. All ranks must call this function together. If there is only one rank, the list is empty and the
    second value is 0."""
    groups = dict(link_groups(clock.world, ranks_per_node))
    found = [point for name, group in groups.items() for point in collectives(clock, sizes, name, group)]
    return found, overlap_slowdown(clock, sizes, list(groups.values())[-1]) if groups else 0.0


def products(clock: Clock, sizes: Sizes, precisions: Sequence[str]) -> Iterator[tuple[Product, float]]:
    for precision in precisions:
        for m, n, k in sizes.products:
            a = torch.randn(m, k, device=clock.device).to(DTYPES[precision])
            b = torch.randn(k, n, device=clock.device).to(DTYPES[precision])
            out = a.new_empty(m, n)
            yield Product(precision, m, n, k), clock.seconds(partial(torch.mm, a, b, out=out))


def attention(clock: Clock, sizes: Sizes, precision: str) -> Iterator[tuple[Attention, float]]:
    """Time causal attention with torch's FlashAttention-2 kernel and, on GPUs that support it, with the cuDNN
    kernel."""
    for kernel, backend in KERNELS.items():
        if kernel == "cudnn" and clock.device.type != "cuda":
            continue
        for width in sizes.widths:
            for length in sizes.lengths:
                try:
                    yield from _attention(clock, kernel, backend, width, length, precision)
                except RuntimeError as error:  # this GPU does not support the kernel
                    print(f"{kernel} attention over {length} tokens was not measured: {str(error).splitlines()[0]}")


def _attention(
    clock: Clock, kernel: str, backend: SDPBackend, width: int, length: int, precision: str
) -> Iterator[tuple[Attention, float]]:
    heads = 4 if clock.device.type == "cpu" else 32
    shape = (1, heads, length, width)
    q, k, v = (torch.randn(shape, device=clock.device).to(DTYPES[precision]).requires_grad_() for _ in range(3))
    pairs = heads * length * length / 2
    with sdpa_kernel(backend):
        with torch.no_grad():
            forward = clock.seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.ones_like(out)
        back = clock.seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    yield Attention(kernel, width, 4.0 * pairs * width, length, False), forward
    yield Attention(kernel, width, 10.0 * pairs * width, length, True), back


def moves(clock: Clock, sizes: Sizes) -> Iterator[tuple[int, float]]:
    """Yield (bytes read and written, seconds) for copies of several sizes. On CPUs, the bandwidth from these times is
    only a first estimate, which is later replaced by a fit to the times of whole steps."""
    for rows in sizes.rows:
        x, y = (torch.randn(rows, sizes.columns, device=clock.device) for _ in range(2))
        yield 2 * x.nbytes, clock.seconds(partial(y.copy_, x))


def link_groups(world: int, ranks_per_node: int) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Yield a pair (link name, this rank's process group) for each link. The group for `node` contains the ranks of one
    node. The group for `network` contains the ranks with the same local rank on all nodes. All groups of a link are
    measured at the same time."""
    nodes = world // ranks_per_node
    by_link = {
        "node": [range(n * ranks_per_node, (n + 1) * ranks_per_node) for n in range(nodes)],
        "network": [range(place, world, ranks_per_node) for place in range(ranks_per_node)],
    }
    for link, parts in by_link.items():
        if len(parts[0]) > 1:
            own = [dist.new_group(list(part)) for part in parts]
            mine = next(g for g, part in zip(own, parts, strict=True) if dist.get_rank() in part)
            assert isinstance(mine, dist.ProcessGroup)
            yield link, mine


def collectives(clock: Clock, sizes: Sizes, link: str, group: dist.ProcessGroup) -> Iterator[CollectiveTime]:
    """Time collectives of growing sizes until a call takes a third of a second. On CPUs, each timed call runs a matrix
    product before the collective, and the time of the product is subtracted. Because of the product, ranks that share
    processors reach the collective at different moments and wait for each other, as in training."""
    m, n, k = sizes.products[-1]
    a, b = torch.randn(m, k, device=clock.device), torch.randn(k, n, device=clock.device)
    before = [partial(torch.mm, a, b)] if clock.device.type == "cpu" else []
    alone = clock.seconds(before[0]) if before else 0.0
    for kind in KINDS:
        for moved in sizes.messages:
            calls: list[Callable[[], object]] = [*before, collective(kind, moved, group, clock.device)]
            seconds = clock.seconds(partial(_call_each, calls)) - alone
            yield CollectiveTime(link, kind, group.size(), moved, max(seconds, 1e-6))
            if seconds > 0.35:
                break


def _call_each(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        call()


def collective(kind: str, moved: int, group: dist.ProcessGroup, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a collective and waits until it is complete. The function makes the same calls as a
    training run. The unsharded operand of the collective is an fp32 tensor of about `moved` bytes. On CPUs, a
    reduce-scatter exchanges parts between ranks and then sums them."""
    n = group.size()
    whole = torch.zeros(max(1, moved // 4 // n) * n, device=device)
    part, other = torch.zeros(whole.numel() // n, device=device), torch.zeros_like(whole)
    ranks = dist.get_process_group_ranks(group)
    axis = Axis(group, dist.get_rank(group), n, tuple(ranks))
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_gather":
        return lambda: start_all_gather(part, axis, other).wait()
    if kind == "reduce_scatter":
        return lambda: start_reduce_scatter(whole, axis, part).wait()
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(other, whole, group=group)
    place = ranks.index(dist.get_rank())
    after, before = ranks[(place + 1) % n], ranks[place - 1]

    def pass_on() -> None:
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, whole, after, group), dist.P2POp(dist.irecv, other, before, group)]
        )
        for work in works:
            work.wait()

    return pass_on


def overlap_slowdown(clock: Clock, sizes: Sizes, group: dist.ProcessGroup) -> float:
    """Return the time by which an overlapped all-reduce delays concurrent matrix products, as a fraction of the
    all-reduce's own time."""
    whole = torch.zeros(sizes.messages[-1] // 4, device=clock.device)
    alone = clock.seconds(lambda: dist.all_reduce(whole, group=group))
    m, n, k = sizes.products[-1]
    a, b = torch.randn(m, k, device=clock.device), torch.randn(k, n, device=clock.device)
    once = clock.seconds(lambda: a @ b)
    count = int(2 * alone / once) + 1

    def compute() -> None:
        for _ in range(count):
            a @ b

    def beside() -> None:
        work = dist.all_reduce(whole, group=group, async_op=True)
        compute()
        work.wait()

    return min(1.0, max(0.0, clock.seconds(beside) - clock.seconds(compute)) / alone)
