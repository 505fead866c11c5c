"""Measure device times of calls, upper limits on the speed of a training step, and the breakdown of a profiled step on
one device.

On GPUs, a profile lists kernels and copies. "Idle" is the part of the step in which no kernel or copy runs. On CPU, a
profile contains torch operations. The time of an operation excludes the operations that it calls. A kernel of another
library belongs to the first group whose pattern matches the kernel's name.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron.core.tensor_parallel.linear_formats import linear_format
from megatron.core.torch_private import keep_gpu_busy
from megatron.extensions.observe.diagnosis.trace.pipeline_timeline import covered
from megatron.extensions.speed.fp8.casts import Scaled, scaled_mm
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.training.config.run_config import RunConfig
from tools.bench.side_by_side import Spread

Call = Callable[[], object]
Size = tuple[int, int, int]


@dataclass(frozen=True)
class Part:
    """Part of a training step that is timed separately. `make(config, device)` returns a function without arguments,
    whose calls are timed."""

    group: str
    name: str
    make: Callable[[RunConfig, torch.device], Call]
    tflop: float = 0.0
    gigabytes: float = 0.0
    """Minimum number of gigabytes that a call must read and write."""


@dataclass(frozen=True)
class Row:
    group: str
    name: str
    milliseconds: Spread | None
    tflop: float
    gigabytes: float
    failed: str | None = None
    host_milliseconds: float | None = None
    """Milliseconds that the host takes to launch a call."""

    @property
    def rate(self) -> float:
        """Median speed in TFLOP/s. For parts that compute nothing, such as copies, the unit is GB/s."""
        assert self.milliseconds is not None, self.failed
        return 1e3 * (self.tflop or self.gigabytes) / self.milliseconds.median

    @property
    def result(self) -> str:
        if self.milliseconds is None:
            return self.failed or ""
        slow = self.host_milliseconds is not None and self.host_milliseconds > self.milliseconds.median
        host = f"  host {self.host_milliseconds:.3f} ms" if slow else ""
        rate = f"{self.rate:,.1f} TFLOP/s" if self.tflop else f"{self.rate:,.0f} GB/s"
        return f"{self.milliseconds.median:.3f} ms  {rate}{host}"


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_lost(device: torch.device) -> bool:
    """Return True if this process can no longer use its GPU, for example after an illegal memory access in a kernel."""
    try:
        wait_for(device)
    except RuntimeError:
        return True
    return False


def timed(part: Part, config: RunConfig, device: torch.device, calls: int, rounds: int) -> Row:
    """Measure a part and return its row of the table. If the part fails, the row contains the last line of the
    error."""
    try:
        call = part.make(config, device)
        call()
        wait_for(device)
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        wait_for(device)
        took, started = zip(*(one_round(call, calls, host, device) for _ in range(rounds)), strict=True)
        on_host = Spread.of(started).median if device.type == "cuda" else None
        return Row(part.group, part.name, Spread.of(took), part.tflop, part.gigabytes, None, on_host)
    except Exception as error:
        return Row(part.group, part.name, None, part.tflop, part.gigabytes, f"{type(error).__name__}: {error}"[:300])
    finally:
        if device.type == "cuda" and not is_lost(device):
            torch.cuda.empty_cache()


MOST_SPUN = 0.1
"""Longest time, in seconds, for which a GPU is kept busy while the host launches calls."""


def one_round(call: Call, calls: int, host: float, device: torch.device) -> tuple[float, float]:
    """Return two times in milliseconds: the time that a call takes on the device, and the time that the host takes to
    launch the call. `host` is the approximate time in seconds that the host needs to launch a call. The GPU is kept
    busy until all calls are launched, so that it never waits for the host between short kernels."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        keep_gpu_busy(int(2e9 * min(MOST_SPUN, 1.5 * calls * host)))  # duration in clock cycles, at about 2 GHz
        begin.record()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    started = 1e3 * (time.perf_counter() - start) / calls
    if not on_gpu:
        return started, started
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls, started


# Limits of a step


def products(config: RunConfig) -> dict[str, Size]:
    """Return the size (rows, out, in) of each GEMM in a layer and in the output layer, for one micro-batch, keyed by
    the name of the GEMM."""
    model = config.model
    rows = config.training.micro_batch_size * model.seq_length
    h = model.hidden_size
    ffn = model.ffn_size
    return {
        "qkv": (rows, model.query_projection_size + 2 * model.query_groups * model.head_dim, h),
        "proj": (rows, h, model.query_projection_size),
        "fc1": (rows, ffn * (2 if model.gated else 1), h),
        "fc2": (rows, h, ffn),
        "head": (rows, model.padded_vocab_size, h),
    }


def random(device: torch.device, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def linear_products(size: Size, dtype: torch.dtype, config: RunConfig | None, device: torch.device) -> Call:
    """Return a call that computes the output, the input gradient and the weight gradient of a linear layer on random
    numbers. Results are written to preallocated memory."""
    rows, out, size_in = size
    x, dy, weight = (random(device, *shape, dtype=dtype) for shape in ((rows, size_in), (rows, out), (out, size_in)))
    y = torch.empty_like(dy)
    dx = torch.empty_like(x)
    dw = torch.empty_like(weight)

    def call() -> None:
        torch.mm(x, weight.t(), out=y)
        torch.mm(dy, weight, out=dx)
        torch.mm(dy.t(), x, out=dw)

    return call


def products_in_fp8(size: Size, config: RunConfig, device: torch.device) -> Call:
    """Return a call that computes the three GEMMs of a linear layer (output, input gradient and weight gradient). The
    operands are fp8 tensors in the layout that the kernel requires. On CPU, this program's fp8 GEMM replaces torch's
    fp8 GEMM, which not every CPU supports."""
    (rows, out, size_in) = size
    one = torch.ones((), device=device)
    operands = list[tuple[Scaled, Scaled]]()
    for m, n, inner in (size, (rows, size_in, out), (out, size_in, rows)):
        a, b = (Scaled(random(device, side, inner, dtype=torch.float8_e4m3fn), one) for side in (m, n))
        operands.append((a, b))

    def call() -> None:
        for a, b in operands:
            scaled_mm(a, b, torch.bfloat16, fast_accumulation=True)

    return call


def copied(size: int, from_host: bool, config: RunConfig, device: torch.device) -> Call:
    """Return a call that copies `size` bytes to the device. With `from_host`, the source is pinned host memory;
    otherwise, it is device memory."""
    target = torch.empty(size, dtype=torch.uint8, device=device)
    source = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") if from_host else target.clone()
    return lambda: target.copy_(source, non_blocking=True)


def ceilings(config: RunConfig, device: torch.device) -> list[Row]:
    """Time a large cubic GEMM, each GEMM of the model in the forward and the backward pass, and a copy within device
    memory. On CPU, the cubic GEMM is small and each GEMM is called only once per round, because a single fp8 GEMM can
    take a second."""
    side, calls, size = (8192, 10, 2**30) if device.type == "cuda" else (64, 1, 2**24)
    shapes = {f"{side}^3": (side,) * 3, **products(config)}
    in_bf16 = {name: partial(linear_products, shape, torch.bfloat16) for name, shape in shapes.items()}
    parts = [Part("", f"{name} bf16", make, 6e-12 * prod(shapes[name])) for name, make in in_bf16.items()]
    if linear_format(config.parallel) is not None:
        del shapes["head"]
        parts += [Part("", f"{n} fp8", partial(products_in_fp8, s), 6e-12 * prod(s)) for n, s in shapes.items()]
    parts.append(Part("", "copy", partial(copied, size, False), gigabytes=2e-9 * size))
    return [timed(part, config, device, calls, 5) for part in parts]


def ceiling_tokens(config: RunConfig, found: Sequence[Row]) -> float:
    """Return an upper limit on the tokens per second of a training step: the speed of a step that consists only of its
    GEMMs, which run at the measured rates."""
    rates = {row.name: row.rate for row in found}
    layers, in_fp8 = config.model.num_layers, len(config.options(Fp8Flags).layers(config.model.num_layers))
    seconds = 0.0
    for name, size in products(config).items():
        work = 6e-12 * prod(size)
        counts = {"bf16": 1} if name == "head" else {"bf16": layers - in_fp8, "fp8": in_fp8}
        seconds += sum(work * count / rates[f"{name} {kind}"] for kind, count in counts.items() if count)
    return config.training.micro_batch_size * config.model.seq_length / seconds


# Breakdown of a step

GROUPS: dict[str, str] = {
    "attention": r"flash|fmha|sdpa|scaled_dot_product|attention|attn|dot_do_o|convert_dq",
    "collectives": r"nccl|gloo|c10d|symm_mem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all",
    "optimizer": r"adam|multi_tensor|_foreach|foreach_|vector_norm|lpnorm|normtwoops|norm_ops|nonfinite",
    "norm": r"layer_?norm|rms_?norm|gammabeta|rowwisemoments|triton.*rsqrt",
    "fp8 casts": r"float8|fp8|e4m3|e5m2|aten::amax|aminmax|_rounded|cast_by|triton.*(abs_amax|clamp)",
    "loss": r"triton.*(_exp(_|$)|logsumexp|log_softmax)|cross_entropy|nll_loss",
    "GEMM": r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|scaled_mm|grouped_mm"
    r"|aten::(mm|bmm|addmm|baddbmm|matmul|linear)|mkldnn",
    "embedding": r"embedding|index_put|index_add|index_select|indexselect|indexing|radixsort|scatter|gather",
    # torch.compile names a fused kernel after all of its operations, including casts between dtypes.
    "copies": r"^(?!triton).*(memcpy|memset|copy|catarray|fillfunctor|transpose"
    r"|aten::(cat|clone|contiguous|zero_|fill_|zeros|_to_copy))",
    "elementwise": r"elementwise|triton|reduce|vectorized|softmax|aten::(mul|add|sub|div|exp|sum|gelu|silu|sigmoid"
    r"|relu|masked_fill|pow|rsqrt|mean|neg|where|lt|clamp|bitwise|cos|sin)",
}
OWN: dict[str, str] = {
    "attention_prepare": "attention",
    "attention_forward": "attention",
    "attention_dkdv": "attention",
    "attention_dq": "attention",
    "fp8_attention_kernel": "attention",
    "norm_cast_rows": "fp8 casts",
    "norm_gradient_chunks": "norm",
    "add_parts": "norm",
    "swiglu_tiles": "fp8 casts",
    "head_tiles": "fp8 casts",
    "cast_tiles": "fp8 casts",
    "noting_tiles": "fp8 casts",
    "amax_tiles": "fp8 casts",
    "transpose_tiles": "fp8 casts",
    "add_product_kernel": "GEMM",
    "add_products_kernel": "GEMM",
    "clear_rows_kernel": "other",
    "schedule_kernel": "other",
    "add_grouped_kernel": "GEMM",
    "add_grouped_fp8_kernel": "GEMM",
    "row_products_kernel": "GEMM",
    "cast_along_tokens_kernel": "fp8 casts",
    "add_parts_kernel": "GEMM",
    "selected_forward": "attention",
    "selected_delta": "attention",
    "selected_backward": "attention",
    "selected_sum": "attention",
    "selected_weights": "loss",
    "divergence_of_row": "loss",
    "divergence_of_keys": "loss",
    "score_keys": "attention",
    "select_largest": "attention",
    "loss_and_gradient": "loss",
    "scale_row": "loss",
}
"""Group of each Triton kernel of this program, keyed by the function name that a profile shows."""

OTHER, IDLE = "other", "idle"
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Group:
    name: str
    microseconds: float
    share: float
    """Fraction of the step time that is spent in this group."""
    count: int
    longest: tuple[str, ...]
    """Names of the kernels or operations that take the most time."""


def group_of(name: str) -> str:
    """Return the group to which the name of a kernel or an operation belongs."""
    lower = name.lower()
    return OWN.get(name) or next((group for group, form in GROUPS.items() if re.search(form, lower)), OTHER)


def profiled(step: Callable[[], object], on_gpu: bool, keep: Path | None = None) -> list[Group]:
    """Profile a step, and return its time by group of kernels or operations. `keep` is the path of a file to which the
    trace is saved; None saves no trace."""
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        step()
        took = 1e6 * (time.perf_counter() - start)
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        if keep or on_gpu:
            profiler.export_chrome_trace(str(path))
        if on_gpu:
            return groups_of_trace(json.loads(path.read_text()))
    times = [(entry.key, entry.self_cpu_time_total, entry.count) for entry in profiler.key_averages()]
    busy = sum(own for _, own, _ in times)
    return groups_of(times, max(took, busy), busy)


def groups_of_trace(trace: Mapping[str, Any]) -> list[Group]:
    """Return the breakdown of the kernels and copies in a trace written by `export_chrome_trace`."""
    events = [each for each in trace["traceEvents"] if each.get("ph") == "X" and each.get("cat") in GPU_CATEGORIES]
    spans = [(float(event["ts"]), float(event["ts"] + event["dur"])) for event in events]
    whole = max((stop for _, stop in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    return groups_of([(event["name"], float(event["dur"]), 1) for event in events], whole, covered(spans))


def groups_of(times: Iterable[tuple[str, float, int]], whole: float, busy: float) -> list[Group]:
    """Return the time of each group of kernels or operations. The input is one tuple (name, microseconds, count) for
    each kernel or operation. The longest group is first, and idle time is last. Return an empty list for an empty
    step."""
    by_name: dict[str, Counter[str]] = defaultdict(Counter)
    counts = Counter[str]()
    for name, microseconds, count in times:
        by_name[group_of(name)][name] += microseconds  # type: ignore[assignment]
        counts[group_of(name)] += count
    if not whole:
        return []
    groups = []
    for group, names in by_name.items():
        longest = tuple(name for name, _ in names.most_common(3))
        groups.append(Group(group, names.total(), names.total() / whole, counts[group], longest))
    groups.sort(key=lambda group: -group.microseconds)
    return [*groups, Group(IDLE, whole - busy, (whole - busy) / whole, 0, ())]
