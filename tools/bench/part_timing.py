"""Times of one part of a training step, by the device's clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.training.config.run_config import RunConfig
from tools.bench.ceilings import wait_for
from tools.bench.side_by_side import Spread

Call = Callable[[], object]


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
