"""Where the time of a profiled step goes, in groups of kernels: from the trace that torch.profiler writes.

On GPUs what counts are kernels and copies; idle is the part of the span in which none runs. On CPU it is the operations
of torch, each without those that it calls. A kernel of another library belongs to the first group whose pattern its
name has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    # torch.compile names a fused kernel after all that it does, casts between dtypes included.
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
    "norm_cast_rows": "fp8 casts",
    "norm_gradient_rows": "norm",
    "norm_gradient_chunks": "norm",
    "add_parts": "norm",
    "swiglu_tiles": "fp8 casts",
    "head_tiles": "fp8 casts",
    "cast_tiles": "fp8 casts",
    "amax_tiles": "fp8 casts",
    "transpose_tiles": "fp8 casts",
    "add_product_kernel": "GEMM",
    "add_products_kernel": "GEMM",
    "clear_rows_kernel": "other",
    "loss_and_gradient": "loss",
    "scale_row": "loss",
}
"""Triton kernels of the library, which profiles call by their functions."""

OTHER, IDLE = "other", "idle"


@dataclass(frozen=True)
class Span:
    """One kernel, copy or operation. Microseconds."""

    name: str
    start: float
    length: float
    lane: tuple[Any, ...] = ()
    """Where it ran: spans of one lane do not overlap, or one is within the other."""

    @property
    def stop(self) -> float:
        return self.start + self.length


@dataclass(frozen=True)
class Group:
    name: str
    microseconds: float
    share: float
    """Of the whole span."""
    count: int
    longest: tuple[str, ...]
    """Names that take most of it."""


def group_of(name: str) -> str:
    """The group that a kernel's or an operation's name belongs to."""
    if name in OWN:
        return OWN[name]
    lower = name.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, lower)), OTHER)


def spans_of(trace: Mapping[str, Any], categories: Sequence[str]) -> list[Span]:
    """The events of these categories in a trace as `export_chrome_trace` writes it."""
    return [
        Span(event["name"], float(event["ts"]), float(event["dur"]), (event.get("pid"), event.get("tid")))
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in categories
    ]


GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
CPU_CATEGORIES = ("cpu_op",)


def own_times(spans: Iterable[Span]) -> list[Span]:
    """Each span with the time that spans within it take taken off."""
    lanes: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    found = []
    for lane in lanes.values():
        open_spans: list[list[Any]] = []  # span, time of what is within it
        for span in sorted(lane, key=lambda span: (span.start, -span.length)):
            while open_spans and open_spans[-1][0].stop <= span.start:
                found.append(_less(*open_spans.pop()))
            if open_spans:
                open_spans[-1][1] += span.length
            open_spans.append([span, 0.0])
        found += [_less(*entry) for entry in open_spans]
    return found


def _less(span: Span, inside: float) -> Span:
    return Span(span.name, span.start, max(0.0, span.length - inside), span.lane)


def busy_time(spans: Iterable[Span]) -> float:
    """Microseconds in which at least one span is under way."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.stop - max(until, span.start))
        until = max(until, span.stop)
    return total


def groups_of(spans: Sequence[Span], *, nested: bool) -> list[Group]:
    """Time by group, the longest first, idle last. `nested`: spans hold others, as operations do that call others."""
    if not spans:
        return []
    whole = max(span.stop for span in spans) - min(span.start for span in spans)
    times: dict[str, list[Span]] = defaultdict(list)
    for span in own_times(spans) if nested else spans:
        times[group_of(span.name)].append(span)
    groups = [_group(name, members, whole) for name, members in times.items()]
    groups.sort(key=lambda group: -group.microseconds)
    idle = max(0.0, whole - busy_time(spans))
    return [*groups, Group(IDLE, idle, idle / whole, 0, ())]


def _group(name: str, members: Sequence[Span], whole: float) -> Group:
    by_name: dict[str, float] = defaultdict(float)
    for span in members:
        by_name[span.name] += span.length
    longest = sorted(by_name, key=lambda name: -by_name[name])[:3]
    total = sum(by_name.values())
    return Group(name, total, total / whole, len(members), tuple(longest))


def say_groups(groups: Sequence[Group], say: Callable[[str], None] = print) -> None:
    """The table."""
    say(f"{'where a step goes':<14}{'ms':>12}{'share':>8}{'count':>8}  longest")
    for group in groups:
        names = "; ".join(name[:60] for name in group.longest)
        say(f"{group.name:<14}{group.microseconds / 1000:>15.2f}{group.share:>8.1%}{group.count:>8}  {names}")
