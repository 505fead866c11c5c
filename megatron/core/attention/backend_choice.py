"""Choose the attention kernel on GPUs, FlashAttention or cuDNN, by timing both at the model's own shapes.

Which one is faster depends on the GPU, the head size and the version, so a fixed rule would be wrong somewhere. Ranks
compare the slowest time of each kernel, and all use the same one.
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

from megatron.core.collectives import all_reduce_
from megatron.core.parallel_state import Axis

WARM_UP, REPEATS = 3, 10

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Clock = Callable[[Callable[[], object]], float]
"""Seconds that a call takes."""


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one rank's plain causal attention in training."""

    length: int
    samples: int
    heads: int
    groups: int
    head_dim: int
    value_head_dim: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Choice:
    """Seconds of a forward and backward by kernel; infinite for a kernel that does not support the shape."""

    seconds: Mapping[str, float]

    @property
    def winner(self) -> str | None:
        """The fastest kernel; None if no kernel supports the shape."""
        name = min(self.seconds, key=self.seconds.__getitem__)
        return name if math.isfinite(self.seconds[name]) else None

    def __str__(self) -> str:
        shown = ", ".join(
            f"{name} {1e3 * seconds:.2f} ms" if math.isfinite(seconds) else f"{name} unsupported"
            for name, seconds in self.seconds.items()
        )
        return f"attention kernel: {self.winner or 'torch default'} (forward and backward of a layer: {shown})"


def choose_kernel(shape: AttentionShape, device: torch.device, world: Axis) -> Choice:
    """Times the kernels and makes torch use the fastest. Collective over the world."""
    runs = {name: attention_run(shape, device, backend) for name, backend in BACKENDS.items()}
    choice = compare(runs, device_clock, device, world)
    if choice.winner is not None:
        use(choice.winner)
    return choice


def compare(runs: Mapping[str, Callable[[], object]], clock: Clock, device: torch.device, world: Axis) -> Choice:
    """Times each run on every rank; the slowest rank counts. Collective over the world."""
    seconds = torch.tensor([_time(run, clock) for run in runs.values()], dtype=torch.float64, device=device)
    all_reduce_(seconds, world, dist.ReduceOp.MAX)
    return Choice(dict(zip(runs, seconds.tolist(), strict=True)))


def _time(run: Callable[[], object], clock: Clock) -> float:
    """Seconds of a run; infinite if torch raises RuntimeError, which it does for unsupported shapes."""
    try:
        return clock(run)
    except RuntimeError:
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


def attention_run(shape: AttentionShape, device: torch.device, backend: SDPBackend) -> Callable[[], object]:
    """A forward and backward of attention by one kernel, with operands strided as in a layer."""
    generator = torch.Generator(device).manual_seed(0)

    def operand(heads: int, width: int) -> Tensor:
        size = (shape.length, shape.samples, heads, width)
        x = torch.empty(size, dtype=shape.dtype, device=device).normal_(generator=generator)
        return x.permute(1, 2, 0, 3).requires_grad_()

    q, k = (operand(heads, shape.head_dim) for heads in (shape.heads, shape.groups))
    v, grad = operand(shape.groups, shape.value_head_dim), operand(shape.heads, shape.value_head_dim).detach()

    def run() -> object:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shape.heads != shape.groups)
        return torch.autograd.grad(out, (q, k, v), grad)

    return run


def use(winner: str) -> None:
    """Disables the other kernels in torch. The memory-efficient one goes with cuDNN too, which torch ranks below it."""
    torch.backends.cuda.enable_cudnn_sdp(winner == "cudnn")
    torch.backends.cuda.enable_flash_sdp(winner == "flash")
    torch.backends.cuda.enable_mem_efficient_sdp(winner == "flash")
