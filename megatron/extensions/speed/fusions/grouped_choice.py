"""Choose the kernels for expert products at the start of a run by timing them for the model's tensor shapes. The number
of rows of each expert is known only on the device. torch's grouped GEMM computes the forward pass and the input
gradients. However, it cannot add weight gradients to fp32 sums, and it leaves rows that belong to no expert
uninitialized.

There are two kernels for weight gradients. A tile is a block of an expert's gradient matrix. One kernel distributes the
tiles of all experts as a single list over its programs, and has several tile sizes (`grouped_triton.py`). The other
kernel runs one program for each tile, which suits small numbers of rows. The kernel with one program per tile also
supports outputs that are not in fp32. If kernels are not timed, as in deterministic runs, the first kernel with correct
results is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from megatron.core.moe.grouped_gemms import Segments, add_products_grouped_, clear_rows_behind_
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fusions.kernel_choice import (
    SLOWER,
    Choice,
    Clock,
    FusedKernel,
    RunShapes,
    compare,
    gpu_operator,
    no_result,
    runs_triton,
)

TILES = "tiles"
"""Name of the kernel that runs one program for each tile."""

LISTS = ("wide", "tall", "small")
"""Names of the tile sizes (`grouped_triton.TILINGS`) of the kernel whose programs share a single list of the tiles of
all experts."""

TOLERANCE = 2.0**-12
"""Allowed error of a kernel's sums: the norm of the error, divided by the norm of the sums. The tolerance is small,
because products of 16-bit numbers are exact in fp32 and all kernels sum in fp32. A kernel that omits a loop step or a
tile would have an error of more than 2^-6."""

CHECKED = 64
"""Number of rows and number of columns that are compared at each corner of an expert's gradient."""

_add_in_list = gpu_operator(
    "kernels.grouped_triton:add_grouped_in_list_",
    "(Tensor(a!) out, Tensor dy, Tensor x, Tensor ends, str tiling) -> ()",
    no_result,
)
"""Operator with the same result as `_add_products`, for `out` in fp32. The operator's kernel divides a single list of
tiles among its programs (`grouped_triton.py`)."""

_add_products = gpu_operator(
    "kernels.products_triton:add_grouped_products_",
    "(Tensor(a!) out, Tensor dy, Tensor x, Tensor ends) -> ()",
    no_result,
)
"""Operator that computes out[e] [o, i] += dy_e [n_e, o]ᵀ x_e [n_e, i] for each expert e, summed in fp32 for all dtypes.

The arguments are contiguous: out [experts, o, i], dy [n, o] and x [n, i]. The rows of expert e begin at ends[e - 1] and
end before ends[e]; `ends` is int32."""

_clear_rows = gpu_operator("kernels.products_triton:clear_rows_behind_", "(Tensor(a!) x, Tensor ends) -> ()", no_result)
"""Operator that sets the rows of a contiguous x [n, width] to zero, starting at row ends[-1]. `ends` is int32."""


def add_grouped_(kernel: str, out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
    """Compute out[e] += dy_eᵀ x_e for each expert e with the given kernel.

    Args:
        kernel: Name of the kernel: `TILES`, or an element of `LISTS`.
        out: Gradient sums [experts, o, i].
        dy: Output gradients [n, o], sorted by expert.
        x: Inputs [n, i], sorted by expert.
        segments: Range of rows of each expert.
    """
    if kernel == TILES:
        _add_products(out, dy, x, segments.ends)
    else:
        _add_in_list(out, dy, x, segments.ends, kernel)


@dataclass
class GroupedWeightGrad:
    """Kernels chosen for expert weight gradients, one for each shape (outputs, inputs). For shapes without an entry,
    the kernel `TILES` is used."""

    chosen: dict[tuple[int, int], str] = field(default_factory=dict)
    found: dict[tuple[int, int], Choice] = field(default_factory=dict)
    """Timings of the kernels for each shape (outputs, inputs), to be printed in the log."""

    def suits(self, out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> bool:
        return runs_triton(x)

    def __call__(self, out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
        sums = out.dtype == torch.float32
        add_grouped_(self.chosen.get((out.shape[1], out.shape[2]), TILES) if sums else TILES, out, dy, x, segments)

    plain = staticmethod(add_products_grouped_.__wrapped__)  # type: ignore[attr-defined]

    def samples(self, shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor, Tensor, Segments]]:
        """Yield bf16 operands for the experts of a run, with equal numbers of rows."""
        for outputs, inputs in shapes.expert_matrices if shapes.dtype == torch.bfloat16 else ():
            yield operands_of(shapes, outputs, inputs, even(shapes))

    def lost(self, shapes: RunShapes, world: Axis, clock: Clock | None) -> str | None:
        """Return the reason why a run uses torch instead of these kernels; None if it uses the kernels. Collective over
        all ranks of the world. The returned text names a shape for which no kernel is correct, or for which torch is
        faster than every kernel."""
        self.chosen.clear()
        self.found.clear()
        for operands in self.samples(shapes):
            if not self.suits(*operands):
                continue
            _, outputs, inputs = operands[0].shape
            runs = weight_grad_runs(shapes, outputs, inputs, operands)
            if clock is None:
                del runs["torch"]
            choice = compare(runs, clock or _untimed, shapes.device, world)
            own = Choice({name: seconds for name, seconds in choice.seconds.items() if name != "torch"}, choice.errors)
            if own.winner is None or own.seconds[own.winner] > SLOWER * choice.seconds.get("torch", float("inf")):
                return f"torch is the fastest for {outputs} x {inputs}: {choice.times}"
            self.found[outputs, inputs], self.chosen[outputs, inputs] = choice, own.winner
        return None


def _untimed(run: Callable[[], object]) -> float:
    """Run a candidate kernel once without timing it, and return 0."""
    run()
    return 0.0


def weight_grad_runs(
    shapes: RunShapes, outputs: int, inputs: int, operands: tuple[Tensor, Tensor, Tensor, Segments]
) -> dict[str, Callable[[], object]]:
    """Return functions to time, keyed by name. Each function runs one kernel, or torch's implementation, on the
    operands.

    The first call for a kernel also checks the kernel's sums, once with equal and once with unequal numbers of rows per
    expert. This call raises RuntimeError if the sums are wrong.

    Args:
        shapes: Shapes of the run.
        outputs: Output features of an expert's layer.
        inputs: Input features of an expert's layer.
        operands: Operands that all returned functions use.
    """
    runs: dict[str, Callable[[], object]] = {}
    for kernel in (*LISTS, TILES):
        check = partial(_check, kernel, shapes, outputs, inputs)
        runs[kernel] = _checked_first(check, partial(add_grouped_, kernel, *operands))
    runs["torch"] = partial(GroupedWeightGrad.plain, *operands)
    return runs


def _checked_first(check: Callable[[], None], run: Callable[[], object]) -> Callable[[], object]:
    known = False

    def checked() -> object:
        nonlocal known
        if not known:
            check()
            known = True
        return run()

    return checked


def _check(kernel: str, shapes: RunShapes, outputs: int, inputs: int) -> None:
    """Check a kernel: add the same products twice to zeros, and compare two corners of each expert's sums with products
    in fp64. Raises RuntimeError if the error exceeds `TOLERANCE`."""
    for counts in (even(shapes), uneven(shapes)):
        out, dy, x, segments = operands_of(shapes, outputs, inputs, counts)
        for _ in range(2):
            add_grouped_(kernel, out, dy, x, segments)
        stop = 0
        for expert, count in zip(out, counts, strict=True):
            rows, stop = slice(stop, stop + count), stop + count
            for part in (slice(CHECKED), slice(-CHECKED, None)):
                right = 2 * (dy[rows, part].double().t() @ x[rows, part].double())
                error = (expert[part, part] - right).norm().item()
                if not error <= TOLERANCE * right.norm().item():
                    raise RuntimeError(
                        f"{kernel} adds wrong sums for {count} of {shapes.expert_rows} rows: {error:.1e}"
                    )


def even(shapes: RunShapes) -> list[int]:
    """Return the number of rows of each expert in an even distribution."""
    return [max(0, shapes.expert_rows // shapes.experts - 1)] * shapes.experts


def uneven(shapes: RunShapes) -> list[int]:
    """Return the number of rows of each expert in an uneven distribution. The last expert has half of all rows, the
    first has one row, the second has none, and the others share the remaining rows."""
    rows, experts = shapes.expert_rows, shapes.experts
    if experts < 4:
        return [1, *[0] * (experts - 2), rows // 2][-experts:]
    return [1, 0, *[rows // 2 // experts] * (experts - 3), rows // 2]


def operands_of(
    shapes: RunShapes, outputs: int, inputs: int, counts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Segments]:
    """Return zero sums, random output gradients and inputs, and the segments of the experts. The rows of the experts
    are followed by spare rows, which belong to no expert.

    Args:
        shapes: Shapes of the run.
        outputs: Output features of an expert's layer.
        inputs: Input features of an expert's layer.
        counts: Number of rows of each expert.
    """
    segments = Segments.of_counts(torch.tensor(counts, device=shapes.device), spare=True)
    out = torch.zeros(shapes.experts, outputs, inputs, device=shapes.device)
    return out, shapes.random(shapes.expert_rows, outputs), shapes.random(shapes.expert_rows, inputs), segments


def _cleared_rows(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor]]:
    for _, inputs in shapes.expert_matrices[:1] if shapes.dtype == torch.bfloat16 else ():
        ends = torch.tensor(even(shapes), device=shapes.device).cumsum(0, dtype=torch.int32)
        yield shapes.random(shapes.expert_rows, inputs), ends


ADD_PRODUCTS = GroupedWeightGrad()
CLEAR_ROWS = FusedKernel(_clear_rows, clear_rows_behind_, lambda x, ends: runs_triton(x), _cleared_rows, 0.0)
