"""Choose the fp8 kernels of experts. At the start of a run, the kernels are timed for the tensor shapes of the run, and
the fastest are used (see `grouped_choice.py`). The products of rows, y = x Wᵀ and dX = dY W, are computed by torch or
by a Triton kernel whose programs share a single list of tiles. torch uses its grouped kernel if the GPU supports this
kernel for the recipe. Otherwise, torch computes one product for each expert. The operands of weight gradients are cast
in tiles of 128 tokens (`cast_along_tokens`). Triton's kernel multiplies these operands in fp8, and torch multiplies the
same values in 16 bits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVarTuple

import torch
from torch import Tensor

from megatron.core.moe.grouped_gemms import Segments
from megatron.core.parallel_state import Axis
from megatron.extensions.speed.fp8 import grouped
from megatron.extensions.speed.fp8.blockwise import cast_by_blocks
from megatron.extensions.speed.fp8.casts import TILE, Scaled
from megatron.extensions.speed.fp8.grouped import ExpertTiles, cast_by_rows, rows_of_tiles, tiles_for
from megatron.extensions.speed.fusions.gemm_choice import TOLERANCES, TORCH
from megatron.extensions.speed.fusions.grouped_choice import CHECKED, even, operands_of, uneven
from megatron.extensions.speed.fusions.kernel_choice import (
    SLOWER,
    Choice,
    Clock,
    FusedKernel,
    RunShapes,
    compare,
    gpu_operator,
    has_triton,
    no_result,
    runs_triton,
)
from megatron.extensions.speed.fusions.kernels.casts import TOLERANCE

LISTS = ("square", "shallow", "small")
"""Names of the tilings of the weight gradient kernel (`grouped_fp8_triton.TILINGS`)."""

ROW_LISTS = ("square", "shallow", "flat")
"""Names of the tilings of the kernel that multiplies rows by expert matrices (`grouped_fp8_triton.ROW_TILINGS`)."""

ANY = "shallow"
"""Tiling for shapes that were not timed. The blocks of this tiling fit into the shared memory of every GPU that
supports fp8."""

Operands = TypeVarTuple("Operands")
Run = Callable[[], object]


def _fake_cast(x: Tensor, ends: Tensor, tile_ends: Tensor) -> tuple[Tensor, Tensor]:
    tiles = tiles_for(x.shape[0], ends.shape[0])
    values = x.new_empty((x.shape[1], TILE * tiles), dtype=torch.float8_e4m3fn)
    return values, x.new_empty((tiles, x.shape[1]), dtype=torch.float32)


def _fake_rows(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, ends: Tensor, dtype: torch.dtype, tiling: str
) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]), dtype=dtype)


MODULE = "kernels.grouped_fp8_triton"
_cast = gpu_operator(
    f"{MODULE}:cast_along_tokens", "(Tensor x, Tensor ends, Tensor tile_ends) -> (Tensor, Tensor)", _fake_cast
)
_add = gpu_operator(
    f"{MODULE}:add_grouped_fp8_",
    "(Tensor(a!) out, Tensor dy, Tensor dy_scale, Tensor x, Tensor x_scale, Tensor tile_ends, str tiling) -> ()",
    no_result,
)
_multiply = gpu_operator(
    f"{MODULE}:multiply_rows",
    "(Tensor x, Tensor x_scale, Tensor w, Tensor w_scale, Tensor ends, ScalarType dtype, str tiling) -> Tensor",
    _fake_rows,
)


@dataclass
class ExpertKernel(Generic[*Operands]):
    """Operation on the rows of experts. For each shape (outputs, inputs) of the run, it uses the fastest kernel. For
    shapes that were not timed, the operation uses the tiling `ANY`."""

    chosen: dict[tuple[int, int], str] = field(default_factory=dict)
    found: dict[tuple[int, int], Choice] = field(default_factory=dict)
    """Timings of the kernels for each shape (outputs, inputs), to be printed in the log."""

    @abstractmethod
    def runs(self, shapes: RunShapes) -> Iterator[tuple[tuple[int, int], dict[str, Run]]]:
        """Yield the shape (outputs, inputs) of each product in a training run, and one function per kernel that runs
        this kernel. The last function, with the name `TORCH`, runs torch's implementation. A kernel's first run raises
        RuntimeError if its results are wrong."""

    def lost(self, shapes: RunShapes, world: Axis, clock: Clock | None) -> str | None:
        """Return the reason why a run uses torch instead of these kernels; None if it uses the kernels. Collective over
        all ranks of the world.

        The returned text names a shape for which no kernel is correct, or for which torch is faster than every kernel.
        """
        self.chosen.clear()
        self.found.clear()
        if not _on_gpu(shapes) or shapes.fp8 is None:
            return None
        if not has_triton():
            return "Triton is not installed"
        for shape, runs in self.runs(shapes):
            if (why := self.compare(shape, runs, shapes, world, clock)) is not None:
                return why
        return None

    def compare(
        self, shape: tuple[int, int], runs: dict[str, Run], shapes: RunShapes, world: Axis, clock: Clock | None
    ) -> str | None:
        """Choose the fastest kernel for one shape of an expert operation. If torch is faster than all kernels, return
        the reason why torch is used. Otherwise, return None.

        Args:
            shape: (outputs, inputs) of the product.
            runs: Functions to compare: for each kernel name, a function that runs the kernel.
            shapes: Shapes of the training run.
            world: Axis of all ranks.
            clock: Function that times a run. If None, kernels are not timed, and the first correct kernel is chosen.
        """
        choice = compare(runs, clock or _untimed, shapes.device, world)
        own = Choice({name: seconds for name, seconds in choice.seconds.items() if name != TORCH}, choice.errors)
        if own.winner is None or (clock and own.seconds[own.winner] > SLOWER * choice.seconds[TORCH]):
            return f"torch is the fastest for {shape[0]} x {shape[1]}: {choice.times}"
        self.found[shape], self.chosen[shape] = choice, own.winner
        return None


def _on_gpu(shapes: RunShapes) -> bool:
    return shapes.device.type == "cuda"


def _untimed(run: Run) -> float:
    """Run a candidate kernel once without timing it, and return 0."""
    run()
    return 0.0


class Fp8WeightGrads(ExpertKernel[Tensor, ExpertTiles, ExpertTiles, Tensor]):
    """Kernels for fp8 weight gradients, which sum products over the rows of each expert."""

    def suits(self, out: Tensor, dy: ExpertTiles, x: ExpertTiles, tile_ends: Tensor) -> bool:
        return runs_triton(out) and out.dtype == torch.float32 and out.is_contiguous()

    def __call__(self, out: Tensor, dy: ExpertTiles, x: ExpertTiles, tile_ends: Tensor) -> None:
        _add(out, *dy[:2], *x[:2], tile_ends, self.chosen.get((out.shape[1], out.shape[2]), ANY))

    plain = staticmethod(grouped.add_fp8_products_grouped_.__wrapped__)  # type: ignore[attr-defined]

    def samples(self, shapes: RunShapes) -> Iterator[tuple[Tensor, ExpertTiles, ExpertTiles, Tensor]]:
        """Yield operands with the shapes of a run's experts. All experts have the same number of rows."""
        for outputs, inputs in shapes.expert_matrices if shapes.fp8 is not None else ():
            yield tiles_of(shapes, outputs, inputs, even(shapes))

    def runs(self, shapes: RunShapes) -> Iterator[tuple[tuple[int, int], dict[str, Run]]]:
        for outputs, inputs in shapes.expert_matrices:
            operands = tiles_of(shapes, outputs, inputs, even(shapes))
            runs: dict[str, Run] = {
                name: _checked(partial(self.check, name, shapes, outputs, inputs), partial(self.add, name, *operands))
                for name in LISTS
            }
            yield (outputs, inputs), runs | {TORCH: partial(self.plain, *operands)}

    @staticmethod
    def add(tiling: str, out: Tensor, dy: ExpertTiles, x: ExpertTiles, tile_ends: Tensor) -> None:
        """Run the kernel for weight gradients with the given tiling, a key of `grouped_fp8_triton.TILINGS`. The other
        arguments are the same as for `add_fp8_products_grouped_`."""
        _add(out, *dy[:2], *x[:2], tile_ends, tiling)

    def check(self, tiling: str, shapes: RunShapes, outputs: int, inputs: int) -> None:
        """Check the kernel with the given tiling: add the same products twice to zeros, and raise RuntimeError unless
        two corners of each expert's sums are correct."""
        for counts in (even(shapes), uneven(shapes)):
            out, dy, x, tile_ends = tiles_of(shapes, outputs, inputs, counts)
            for _ in range(2):
                self.add(tiling, out, dy, x, tile_ends)
            start = 0
            for expert, stop in zip(out, tile_ends.tolist(), strict=True):
                for part in (slice(CHECKED), slice(-CHECKED, None)):
                    one, two = (rows_of_tiles(_part(each, start, stop, part), torch.float64) for each in (dy, x))
                    _compare(expert[part, part], 2 * (one.t() @ two), tiling)
                start = stop


class Fp8RowProducts(ExpertKernel[Scaled, Scaled, Segments, torch.dtype, bool]):
    """Kernels that multiply the fp8 rows of each expert by the expert's matrix."""

    def suits(self, a: Scaled, b: Scaled, segments: Segments, out_dtype: torch.dtype, in_one_kernel: bool) -> bool:
        timed = (b.values.shape[1], b.values.shape[2]) in self.chosen
        return runs_triton(a.values) and (timed or not grouped.torch_groups(a, in_one_kernel))

    def __call__(self, a: Scaled, b: Scaled, segments: Segments, out_dtype: torch.dtype, in_one_kernel: bool) -> Tensor:
        tiling = self.chosen.get((b.values.shape[1], b.values.shape[2]), ANY)
        return segments.clear_spare_(_multiply(*a, *b, segments.ends, out_dtype, tiling))

    plain = staticmethod(grouped.grouped_scaled_mm.__wrapped__)  # type: ignore[attr-defined]

    def samples(self, shapes: RunShapes) -> Iterator[tuple[Scaled, Scaled, Segments, torch.dtype, bool]]:
        """Yield operands with the shapes of a run's experts. All experts have the same number of rows."""
        for outputs, inputs in shapes.expert_matrices if shapes.fp8 is not None else ():
            yield (*rows_of(shapes, outputs, inputs, even(shapes)), shapes.dtype, True)

    def runs(self, shapes: RunShapes) -> Iterator[tuple[tuple[int, int], dict[str, Run]]]:
        for matrix in shapes.expert_matrices:
            for outputs, inputs in (matrix, matrix[::-1]):
                operands = rows_of(shapes, outputs, inputs, even(shapes))
                runs: dict[str, Run] = {
                    name: _checked(
                        partial(self.check, name, shapes, outputs, inputs), partial(self.multiply, name, *operands)
                    )
                    for name in ROW_LISTS
                }
                yield (outputs, inputs), runs | {TORCH: partial(self.plain, *operands, shapes.dtype, True)}

    @staticmethod
    def multiply(tiling: str, a: Scaled, b: Scaled, segments: Segments) -> Tensor:
        """Run the kernel for products of rows with the given tiling, a key of `grouped_fp8_triton.ROW_TILINGS`. The
        other arguments are the same as for `grouped_scaled_mm`."""
        return _multiply(*a, *b, segments.ends, torch.bfloat16, tiling)

    def check(self, tiling: str, shapes: RunShapes, outputs: int, inputs: int) -> None:
        """Raise RuntimeError if an expert's results are wrong in its first or its last row."""
        for counts in (even(shapes), uneven(shapes)):
            a, b, segments = rows_of(shapes, outputs, inputs, counts)
            y = self.multiply(tiling, a, b, segments)
            stop = 0
            for expert, count in enumerate(counts):
                start, stop = stop, stop + count
                if not count:
                    continue
                matrix = Scaled(b.values[expert], b.scale[expert]).dequantized(torch.float64)
                for part, place in (
                    (slice(start, start + 1), slice(CHECKED)),
                    (slice(stop - 1, stop), slice(-CHECKED, None)),
                ):
                    row = Scaled(a.values[part], a.scale[part]).dequantized(torch.float64)
                    _compare(y[part, place], row @ matrix[place].t(), tiling)


def _part(tiles: ExpertTiles, start: int, stop: int, columns: slice) -> ExpertTiles:
    """Return the tiles [start, stop) with only the given range of columns."""
    values, rows = tiles.values[columns, TILE * start : TILE * stop], TILE * (stop - start)
    return ExpertTiles(values, tiles.scale[start:stop, columns], rows)


def _compare(found: Tensor, right: Tensor, kernel: str) -> None:
    error = (found - right).norm().item()
    if not error <= TOLERANCES[torch.float32] * right.norm().item():
        raise RuntimeError(f"{kernel} is wrong by {error:.1e}")


def _checked(check: Run, run: Run) -> Run:
    """Return a function that calls `run`. Before the first call to `run`, the function calls `check`."""
    known = False

    def checked() -> object:
        nonlocal known
        if not known:
            check()
            known = True
        return run()

    return checked


def tiles_of(
    shapes: RunShapes, outputs: int, inputs: int, counts: Sequence[int]
) -> tuple[Tensor, ExpertTiles, ExpertTiles, Tensor]:
    """Return zero weight gradients, random output gradients and inputs, and the end of each expert's tiles. The output
    gradients and the inputs are cast with `cast_along_tokens`.

    Args:
        shapes: Shapes of the run.
        outputs: Output features of an expert's layer.
        inputs: Input features of an expert's layer.
        counts: Number of rows of each expert.
    """
    out, dy, x, segments = operands_of(shapes, outputs, inputs, counts)
    tile_ends = segments.padded(TILE).ends // TILE
    cast = grouped.cast_along_tokens.__wrapped__  # type: ignore[attr-defined]
    one, two = (cast(each, segments.ends, tile_ends, _on_gpu(shapes)) for each in (dy, x))
    return out, one, two, tile_ends


def rows_of(shapes: RunShapes, outputs: int, inputs: int, counts: Sequence[int]) -> tuple[Scaled, Scaled, Segments]:
    """Return random rows and random matrices, both cast with the run's fp8 recipe, and the segments of the experts.

    Args:
        shapes: Shapes of the run.
        outputs: Output features of an expert's layer.
        inputs: Input features of an expert's layer.
        counts: Number of rows of each expert.
    """
    segments = Segments.of_counts(torch.tensor(counts, device=shapes.device), spare=True)
    x, matrices = shapes.random(shapes.expert_rows, inputs), shapes.random(shapes.experts, outputs, inputs)
    if shapes.fp8 != "blockwise":
        return cast_by_rows(x), cast_by_rows(matrices), segments
    return cast_by_blocks(x, 1, grouped.E4M3), grouped.blocks_of(matrices), segments


def said(kernels: Mapping[str, ExpertKernel[*tuple[object, ...]]]) -> Iterator[str]:
    """Yield one log line for each operation and shape, with the chosen kernel and the timings. `kernels` maps a
    description of each operation, such as "fp8 products of experts", to the operation's kernels."""
    for subject, kernel in kernels.items():
        for (outputs, inputs), choice in kernel.found.items():
            yield f"kernel of {subject} {outputs} x {inputs}: {choice.winner} ({choice.times})"


def _cast_samples(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor, Tensor, bool]]:
    for _, inputs in shapes.expert_matrices[:1] if shapes.fp8 is not None else ():
        segments = Segments.of_counts(torch.tensor(uneven(shapes), device=shapes.device), spare=True)
        yield shapes.random(shapes.expert_rows, inputs), segments.ends, segments.padded(TILE).ends // TILE, True


CAST = FusedKernel(
    lambda x, ends, tile_ends, compiled: ExpertTiles(*_cast(x.contiguous(), ends, tile_ends), x.shape[0]),
    grouped.cast_along_tokens,
    lambda x, *_: runs_triton(x),
    _cast_samples,
    TOLERANCE,
)
WEIGHT_GRADS = Fp8WeightGrads()
ROW_PRODUCTS = Fp8RowProducts()
