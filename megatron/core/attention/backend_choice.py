"""Choose the attention kernel on GPUs, FlashAttention-2 or 3 or cuDNN, by timing them at the model's own shape.

With dropout the choice is between the fused kernel with dropout (triton) and tiles in plain torch (unfused).

Which one is faster depends on the GPU, the head size and the version, so a fixed rule would be wrong somewhere. Ranks
compare the slowest time of each kernel, and all use the same one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.attention.core_attention import FusedAttention, dropout_kernel, kernels_of
from megatron.core.attention.local_attention import local_attention
from megatron.core.attention.partition import Spans
from megatron.core.attention.tile_kernels import Causal, Dropout
from megatron.core.collectives import all_reduce_
from megatron.core.parallel_state import Axis

WARM_UP, REPEATS = 3, 10

BACKENDS = ("flash", "flash3", "cudnn")

DROPOUT_BACKENDS = ("triton", "unfused")
"""Kernels with dropout, which the others have not."""

OF_TORCH = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
"""Those that scaled_dot_product_attention has."""

Clock = Callable[[Callable[[], object]], float]
"""Seconds that a call takes."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one rank's causal attention in training."""

    length: int
    """Keys."""
    samples: int
    heads: int
    groups: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype
    queries: Spans | None = None
    """Positions of this rank's queries under context parallelism by p2p or all_gather; None for all."""

    window: int | None = None
    """Keys that a query sees in every layer; None for all up to its own."""

    tiles: bool = False
    """Whether kernels of tiles compute it: context parallelism, documents and windows."""

    documents: bool = False
    """Whether samples hold documents."""

    dropout: float = 0.0
    """Share of the attention weights that is dropped."""

    untimed: bool = False
    """Whether timings may not decide: a kernel with dropout is used where it runs."""

    @property
    def backends(self) -> tuple[str, ...]:
        """The kernels to be timed: cuDNN is not used for documents and windows."""
        if self.dropout:
            return DROPOUT_BACKENDS[:1] if self.untimed else DROPOUT_BACKENDS
        varlen = self.tiles and (self.window is not None or self.documents)
        return tuple(name for name in BACKENDS if not (varlen and name == "cudnn"))


@dataclass(frozen=True)
class Choice:
    """Seconds of a forward and backward by kernel; infinite for a kernel that does not support the shape, or is not
    installed."""

    seconds: Mapping[str, float]

    @property
    def winner(self) -> str | None:
        """The fastest kernel; None if no kernel supports the shape."""
        name = min(self.seconds, key=self.seconds.__getitem__)
        return name if math.isfinite(self.seconds[name]) else None

    @property
    def times(self) -> str:
        """All times, for a log."""
        return ", ".join(
            f"{name} {1e3 * seconds:.2f} ms" if math.isfinite(seconds) else f"{name} unavailable"
            for name, seconds in self.seconds.items()
        )

    def __str__(self) -> str:
        return f"attention kernel: {self.winner or 'torch default'} (forward and backward of a layer: {self.times})"


def choose_kernel(shape: AttentionShape, device: torch.device, world: Axis, fixed: str | None = None) -> Choice:
    """Times the kernels, or the `fixed` one alone, and makes torch use the fastest. Collective over the world.

    Raises ValueError if the fixed one does not run on some rank.
    """
    names = shape.backends if fixed is None else (fixed,)
    choice = compare({name: _lazily(shape, device, name) for name in names}, device_clock, device, world)
    if fixed is not None and choice.winner is None:
        raise ValueError(
            f"--attention-backend {fixed}: on some rank this kernel is not installed, or does not support the GPU or "
            f"the model's attention (head size {shape.head_dim}, {shape.dtype}); use auto"
        )
    if choice.winner is not None:
        use(choice.winner)
    return choice


def _lazily(shape: AttentionShape, device: torch.device, name: str) -> Callable[[], object]:
    """A run whose operands are made when it is first called, so that with `compare` those of one kernel are in memory
    at a time."""
    made: list[Callable[[], object]] = []

    def run() -> object:
        if not made:
            made.append(attention_run(shape, device, name))
        return made[0]()

    return run


def compare(runs: dict[str, Callable[[], object]], clock: Clock, device: torch.device, world: Axis) -> Choice:
    """Times each run on every rank; the slowest rank counts. What has been timed is taken out of `runs`, so that its
    operands go away. Collective over the world."""
    names = list(runs)
    found = [_time(runs.pop(name), clock) for name in names]
    seconds = torch.tensor(found, dtype=torch.float64, device=device)
    all_reduce_(seconds, world, dist.ReduceOp.MAX)
    return Choice(dict(zip(names, seconds.tolist(), strict=True)))


def _time(run: Callable[[], object], clock: Clock) -> float:
    """Seconds of a run; infinite if torch raises RuntimeError, which it does for unsupported shapes, or a package is
    missing or takes other arguments."""
    try:
        return clock(run)
    except (RuntimeError, ImportError, TypeError):
        return math.inf


def device_clock(run: Callable[[], object]) -> float:
    """Median of `REPEATS` runs, in seconds on the GPU."""
    for _ in range(WARM_UP):
        run()
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def attention_run(shape: AttentionShape, device: torch.device, backend: str) -> Callable[[], object]:
    """A forward and backward of attention by one kernel, as a layer computes it."""
    generator = torch.Generator(device).manual_seed(0)

    def operand(rows: int, heads: int, width: int) -> Tensor:
        x = torch.empty(rows, shape.samples, heads, width, dtype=shape.dtype, device=device)
        return x.normal_(generator=generator).requires_grad_()

    rows = shape.length if shape.queries is None else sum(map(len, shape.queries))
    q = operand(rows, shape.heads, shape.head_dim)
    k, v = (operand(shape.length, shape.groups, width) for width in (shape.head_dim, shape.value_head_dim))
    grad = operand(rows, shape.heads, shape.value_head_dim).detach()
    scale = shape.head_dim**-0.5
    widths = shape.head_dim, shape.value_head_dim
    fused = FusedAttention(scale, backend == "flash3")
    plain, varlen = kernels_of(backend, scale, shape.dtype, device, *widths)
    kernel = varlen if shape.documents or shape.window is not None else plain
    if shape.dropout:
        numbers = torch.arange(shape.samples, device=device)
        kernel = dropout_kernel(backend, scale, Dropout(shape.dropout, 0, 0, numbers))
    causal = Causal(kernel, None, shape.window)

    def run() -> object:
        if shape.tiles or shape.dropout:
            out = local_attention(q, k, v, causal, shape.queries)
        else:
            with sdpa_kernel(OF_TORCH[backend]) if backend in OF_TORCH else nullcontext():
                out = fused(q, k, v)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def use(winner: str) -> None:
    """Disables the other kernels in torch. The memory-efficient one goes with cuDNN too, which torch ranks below it."""
    if winner in OF_TORCH:
        torch.backends.cuda.enable_cudnn_sdp(winner == "cudnn")
        torch.backends.cuda.enable_flash_sdp(winner == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(winner == "flash")
