"""Which of torch's attention kernels for GPUs a model uses: measured once, at its own shapes.

Flash attention and cuDNN's overtake each other from one GPU, head width and version to the next, so a choice by rule
is wrong somewhere. Ranks compare what each took longest for, and take one kernel everywhere.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.parallel_state import Axis

WARM_UP, REPEATS = 3, 10

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Clock = Callable[[Callable[[], object]], float]
"""Seconds that a call takes."""


@dataclass(frozen=True)
class AttentionShape:
    """Of one rank's plain causal attention in training."""

    length: int
    samples: int
    heads: int
    groups: int
    head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Choice:
    """`seconds` by kernel, forward and backward; infinite for one that does not take these shapes."""

    seconds: Mapping[str, float]

    @property
    def winner(self) -> str | None:
        """None if none runs."""
        name = min(self.seconds, key=self.seconds.__getitem__)
        return name if math.isfinite(self.seconds[name]) else None

    def __str__(self) -> str:
        shown = ", ".join(
            f"{name} {1e3 * seconds:.2f} ms" if math.isfinite(seconds) else f"{name} does not take it"
            for name, seconds in self.seconds.items()
        )
        return f"attention by {self.winner or 'what torch takes'} (a layer's forward and backward: {shown})"


def choose_kernel(shape: AttentionShape, device: torch.device, world: Axis) -> Choice:
    """Measures the kernels and has torch use the fastest from now on. Collective over the world."""
    runs = {name: attention_run(shape, device, backend) for name, backend in BACKENDS.items()}
    choice = compare(runs, device_clock, device, world)
    if choice.winner is not None:
        use(choice.winner)
    return choice


def compare(runs: Mapping[str, Callable[[], object]], clock: Clock, device: torch.device, world: Axis) -> Choice:
    """Times each run on each rank: what counts is the slowest one's. Collective over the world."""
    seconds = torch.tensor([_time(run, clock) for run in runs.values()], dtype=torch.float64, device=device)
    if world.size > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=world.group)
    return Choice(dict(zip(runs, seconds.tolist(), strict=True)))


def _time(run: Callable[[], object], clock: Clock) -> float:
    """Infinite where torch has no kernel for it, which it says with a RuntimeError."""
    try:
        return clock(run)
    except RuntimeError:
        return math.inf


def device_clock(run: Callable[[], object]) -> float:
    """Median of `REPEATS` on the GPU."""
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


def attention_run(shape: AttentionShape, device: torch.device, backend: SDPBackend) -> Callable[[], object]:
    """Forward and backward of attention by one kernel, its operands laid out as layers have them."""
    generator = torch.Generator(device).manual_seed(0)

    def operand(heads: int) -> Tensor:
        size = (shape.length, shape.samples, heads, shape.head_dim)
        x = torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=generator)
        return x.permute(1, 2, 0, 3).requires_grad_()

    q, k, v = (operand(heads) for heads in (shape.heads, shape.groups, shape.groups))
    grad = operand(shape.heads).detach()

    def run() -> object:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.groups)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def use(winner: str) -> None:
    """Turns the other kernels off where torch would take them first: it prefers those for masks to cuDNN's."""
    torch.backends.cuda.enable_cudnn_sdp(winner == "cudnn")
    torch.backends.cuda.enable_flash_sdp(winner == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(winner == "flash")
