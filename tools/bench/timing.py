"""Times on one device: matrix products and copies, which bound a step, and parts of a step by the device's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.parts import linear_format
from megatron.extensions.fp8.flags import Fp8Flags
from megatron.training.config.run_config import RunConfig
from tools.bench.side_by_side import Spread

Call = Callable[[], object]


def wait_for(device: Any) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Ceiling:
    """What the device does at most of one thing."""

    name: str
    rate: Spread
    unit: str


def timed_calls(call: Callable[[], Any], device: Any, work: float, calls: int, rounds: int = 5) -> Spread:
    """`work`, which each call does, per second."""
    call()
    wait_for(device)
    rates = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait_for(device)
        rates.append(work * calls / (time.perf_counter() - start))
    return Spread.of(rates)


def products(config: RunConfig) -> dict[str, tuple[int, int, int]]:
    """Name -> (rows, out, in): the products of a layer and of the head, over one micro-batch."""
    model = config.model
    rows, h, ffn = config.training.micro_batch_size * model.seq_length, model.hidden_size, model.ffn_size
    return {
        "qkv": (rows, model.query_projection_size + 2 * model.query_groups * model.head_dim, h),
        "proj": (rows, h, model.query_projection_size),
        "fc1": (rows, ffn * (2 if model.gated else 1), h),
        "fc2": (rows, h, ffn),
        "head": (rows, model.padded_vocab_size, h),
    }


def products_in_bf16(rows: int, out: int, size_in: int, device: Any) -> Callable[[], None]:
    """Forward, input gradient and weight gradient of a linear layer, on random numbers."""
    import torch

    of = {"dtype": torch.bfloat16, "device": device}
    x, dy, weight = (torch.randn(shape, **of) for shape in ((rows, size_in), (rows, out), (out, size_in)))
    y, dx, dw = torch.empty_like(dy), torch.empty_like(x), torch.empty_like(weight)

    def call() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(dy, weight, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return call


def products_in_fp8(rows: int, out: int, size_in: int, device: Any) -> Callable[[], None]:
    """The same three, of operands that are in fp8 and lie as the kernel wants them."""
    import torch

    one = torch.ones((), device=device)

    def random(*shape: int) -> Any:
        return torch.randn(shape, device=device).to(torch.float8_e4m3fn)

    operands = [
        (random(rows, size_in), random(out, size_in)),
        (random(rows, out), random(size_in, out)),
        (random(out, rows), random(size_in, rows)),
    ]

    def call() -> None:
        for left, right in operands:
            torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def ceilings(config: RunConfig, device: Any) -> Iterator[Ceiling]:
    """A large cube and each product of the model, forward and backward, then a copy within memory. On CPU a small cube
    and few calls: fp8 products may take a second each there."""
    import torch

    on_gpu = device.type == "cuda"
    side, calls = (8192, 10) if on_gpu else (64, 1)
    for kind, make in (("bf16", products_in_bf16), ("fp8", products_in_fp8)):
        for name, shape in {f"{side}^3": (side,) * 3, **products(config)}.items():
            if kind == "bf16" or (linear_format(config.parallel) is not None and name != "head"):
                rows, out, size_in = shape
                call, work = make(rows, out, size_in, device), 6e-12 * rows * out * size_in
                yield Ceiling(f"{name} {kind}", timed_calls(call, device, work, calls), "TFLOP/s")
    size = 2**30 if on_gpu else 2**24
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield Ceiling(
        "copy", timed_calls(lambda: target.copy_(source), device, 2e-9 * size, calls), "GB/s, read and written"
    )


def ceiling_tokens(config: RunConfig, found: Sequence[Ceiling]) -> float:
    """Tokens per second if a step were its matrix products alone, at the rates measured."""
    rates = {ceiling.name: ceiling.rate.median for ceiling in found}
    layers, in_fp8 = config.model.num_layers, len(config.options(Fp8Flags).layers(config.model.num_layers))
    seconds = 0.0
    for name, (rows, out, size_in) in products(config).items():
        work = 6e-12 * rows * out * size_in
        if name == "head":
            seconds += work / rates["head bf16"]
            continue
        seconds += work * (layers - in_fp8) / rates[f"{name} bf16"]
        seconds += work * in_fp8 / rates[f"{name} fp8"] if in_fp8 else 0.0
    return config.training.micro_batch_size * config.model.seq_length / seconds


# Parts of a training step


@dataclass(frozen=True)
class Part:
    """`make(config, device)` returns the call that is timed."""

    group: str
    name: str
    make: Callable[[RunConfig, Any], Call]
    tflop: float = 0.0
    gigabytes: float = 0.0
    """Read and written at least."""


@dataclass(frozen=True)
class Row:
    group: str
    name: str
    milliseconds: Spread | None
    tflop: float
    gigabytes: float
    failed: str | None = None
    host_milliseconds: float | None = None
    """That the host takes to start a call."""

    @property
    def rate(self) -> str:
        """TFLOP/s or else GB/s of the median."""
        if self.milliseconds is None:
            return ""
        seconds = self.milliseconds.median / 1e3
        return f"{self.tflop / seconds:,.1f} TFLOP/s" if self.tflop else f"{self.gigabytes / seconds:,.0f} GB/s"

    @property
    def result(self) -> str:
        if self.milliseconds is None:
            return self.failed or ""
        slow = self.host_milliseconds is not None and self.host_milliseconds > self.milliseconds.median
        host = f"  host {self.host_milliseconds:.3f} ms" if slow else ""
        return f"{self.milliseconds.median:.3f} ms  {self.rate}{host}"


def timed(part: Part, config: RunConfig, device: Any, calls: int, rounds: int) -> Row:
    """The row of a part; what goes wrong in it is its last line."""
    import torch

    try:
        call = part.make(config, device)
        call()
        wait_for(device)
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        wait_for(device)
        one_round = _round_on_gpu if device.type == "cuda" else _round_on_cpu
        found = [one_round(call, calls, host) for _ in range(rounds)]
        took, started = (Spread.of(each) for each in zip(*found, strict=True))
        on_host = started.median if device.type == "cuda" else None
        return Row(part.group, part.name, took, part.tflop, part.gigabytes, None, on_host)
    except Exception as error:
        return Row(part.group, part.name, None, part.tflop, part.gigabytes, f"{type(error).__name__}: {error}"[:300])
    finally:
        if device.type == "cuda" and not is_lost(device):
            torch.cuda.empty_cache()


def _round_on_cpu(call: Call, calls: int, host: float) -> tuple[float, float]:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    took = 1e3 * (time.perf_counter() - start) / calls
    return took, took


MOST_SPUN = 0.1
"""Seconds that a GPU is kept busy while the host starts calls."""


def _round_on_gpu(call: Call, calls: int, host: float) -> tuple[float, float]:
    """Milliseconds of a call on the device, and of its start on the host, which takes about `host` seconds. The device
    is busy until all calls have been started, so that it never waits for the host between short kernels."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e9 * min(MOST_SPUN, 1.5 * calls * host)))  # cycles, of about 2 GHz
    begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    started = time.perf_counter() - start
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls, 1e3 * started / calls


def is_lost(device: Any) -> bool:
    """Whether this process cannot use its GPU any more: a kernel has read or written where it must not."""
    try:
        wait_for(device)
    except RuntimeError:
        return True
    return False
