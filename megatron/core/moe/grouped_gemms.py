"""Grouped GEMMs over rows that are sorted by expert. Each row is multiplied by the matrix of its expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.compiled_regions import torch_function
from megatron.core.host_to_device import HostCopy, has_values, integers_on
from megatron.core.kernels import operation
from megatron.core.tensor_parallel.weight_grad import add_product_


class Segments:
    """Division of a tensor's rows, which are sorted by expert, into one segment per local expert.

    Spare rows follow the rows of the last expert. A spare row belongs to no expert, has no gradient, and contains
    finite but meaningless values. `of_counts` creates segments from row counts on the device, where kernels can read
    the counts. `of_sizes` creates segments from row counts on the host, where the counts can be used to split tensors.
    """

    def __init__(self, sizes: Sequence[int] | None, ends: Tensor | None, device: torch.device, spare: bool) -> None:
        self._sizes = sizes
        self._ends = ends
        self._device = device
        self.spare = spare

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], device: torch.device) -> Segments:
        """Create segments without spare rows. `sizes` contains the row count of each expert, on the host."""
        return cls(sizes, None, device, spare=False)

    @classmethod
    def of_counts(cls, counts: Tensor, spare: bool) -> Segments:
        """Create segments from `counts` [experts], a tensor on the device that contains the row count of each expert.
        Pass `spare=True` if there may be spare rows."""
        return cls(None, counts.cumsum(0, dtype=torch.int32), counts.device, spare)

    @property
    def ends(self) -> Tensor:
        """End index (exclusive) of the rows of each expert, [experts] int32 on the device."""
        if self._ends is None:
            assert self._sizes is not None
            self._ends = integers_on(self._device, accumulate(self._sizes), torch.int32)
        return self._ends

    @property
    def sizes(self) -> Sequence[int]:
        """Number of rows of each expert. If the row counts are only on the device, the host waits for them."""
        if self._sizes is None:
            ends = [0, *HostCopy[int](self.ends).read()]
            self._sizes = [stop - start for start, stop in pairwise(ends)]
        return self._sizes

    def padded(self, multiple: int) -> Segments:
        """Return segments in which each expert's row count is rounded up to a multiple of `multiple`. The returned
        segments may have spare rows, which belong to no expert."""
        if self._sizes is not None:
            return Segments([-(-size // multiple) * multiple for size in self._sizes], None, self._device, True)
        counts = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        return Segments.of_counts((counts + (multiple - 1)) // multiple * multiple, spare=True)

    def experts_of(self, rows: int) -> Tensor:
        """Return the expert number of each row, [rows] int64 on the device. The values for spare rows are
        meaningless."""
        ends = self.ends[:-1].contiguous()
        return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)

    def sizes_of(self, x: Tensor) -> Sequence[int]:
        """Return the number of rows of each expert in x [n, ...].

        The result is `sizes`, for which the host may have to wait. If x is a tensor without values, as in memory
        planning, the method instead assumes that the rows are divided evenly among the experts.
        """
        if self._sizes is None and not has_values(x):
            (rows, *_), experts = x.shape, self.ends.shape[0]
            return [rows // experts + (number < rows % experts) for number in range(experts)]
        return self.sizes

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """Split x [n, ...] into one tensor per expert. The host may have to wait for the row counts (see `sizes`)."""
        sizes = self.sizes_of(x)
        return (x[: sum(sizes)] if self.spare else x).split(tuple(sizes))

    def clear_spare_(self, x: Tensor) -> Tensor:
        """Set the spare rows of x [n, width] to zero. Kernels do not write these rows, so they contain arbitrary
        values."""
        if self.spare:
            clear_rows_behind_(x, self.ends)
        return x


@operation
def clear_rows_behind_(x: Tensor, ends: Tensor) -> None:
    """Set the spare rows of x [n, width] to zero. The first spare row has the index `ends[-1]`."""
    rows = torch.arange(x.shape[0], device=x.device)
    x.masked_fill_((rows >= ends[-1])[:, None], 0.0)


GroupedGemm = Callable[[Tensor, Tensor, Segments], Tensor]
"""Function that computes a grouped GEMM: x [n, in], matrices [experts, in, out] -> y [n, out]. Each row of x is
multiplied by the matrix of its expert. Spare rows of y are 0."""


def gemm_each(x: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Run the grouped GEMM as separate GEMMs, one for each expert that has rows."""
    out = x.new_empty(x.shape[0], matrices.shape[-1])
    for rows, matrix, part in zip(segments.split(x), matrices, segments.split(out), strict=True):
        if rows.shape[0]:
            torch.mm(rows, matrix, out=part)
    return segments.clear_spare_(out)


def gemm_grouped(x: Tensor, matrices: Tensor, segments: Segments) -> Tensor:
    """Run the grouped GEMM as a single kernel. The result is the same as the result of `gemm_each`."""
    if not x.shape[0]:
        return x.new_empty(0, matrices.shape[-1])
    return segments.clear_spare_(F.grouped_mm(x, matrices, offs=segments.ends))


def add_each_product_(out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
    """For each expert e that has rows, add dy_eᵀ x_e to `out[e]` [o, i], in the precision of `out`. The matrices dy_e
    [n_e, o] and x_e [n_e, i] contain the rows of `dy` and `x` that belong to the expert.

    The function runs one matrix product per expert.
    """
    for expert, dy_rows, x_rows in zip(out, segments.split(dy), segments.split(x), strict=True):
        if x_rows.shape[0]:
            add_product_(expert, dy_rows, x_rows)


@operation
@torch_function
def add_products_grouped_(out: Tensor, dy: Tensor, x: Tensor, segments: Segments) -> None:
    """Compute the same result as `add_each_product_`, with a single kernel for all experts."""
    add_each_product_(out, dy, x, segments)


def has_grouped_kernel(dtype: torch.dtype, device: torch.device, *widths: int) -> bool:
    """Return True if torch has a grouped GEMM kernel for the dtype, the device, and matrices whose rows have `widths`
    elements. The kernel requires that the size of each row is a multiple of 16 bytes. On GPUs without the kernel,
    `torch.nn.functional.grouped_mm` reads the row counts on the host and runs one GEMM per expert, like `gemm_each`."""
    if device.type == "cuda":
        kernel = dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] in (9, 10)
    else:
        kernel = dtype != torch.float64
    return kernel and all(width * dtype.itemsize % 16 == 0 for width in widths)


class GroupedGemms:
    """GEMMs of a grouped linear layer, computed in the precision of the parameters.

    A number format in `LINEAR_FORMATS` can replace this object with its own object that has the same attributes.
    """

    def __init__(self, gemm: GroupedGemm, add_weight_grad_: Callable[[Tensor, Tensor, Tensor, Segments], None]) -> None:
        self.gemm, self.add_weight_grad_ = gemm, add_weight_grad_
        """`add_weight_grad_(out, dy, x, segments)` adds the product dyᵀ x of each expert's rows to the expert's matrix
        in `out`. The shapes are: out [experts, out, in], dy [n, out], x [n, in]."""
        self.add_bias_grad_ = add_weight_grad_
        """Function that adds a bias gradient. By default, it is the same function as `add_weight_grad_`, because a bias
        can be treated as the weight of an additional input feature."""

    def forward(self, x: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """Compute the output y [n, out] from x [n, in] and the weight [experts, ..., in]."""
        return self.gemm(x, matrices_of(weight).transpose(1, 2), segments)

    def input_grad(self, dy: Tensor, weight: Tensor, segments: Segments) -> Tensor:
        """Compute the input gradient dX [n, in] from dY [n, out] and the weight [experts, ..., in]."""
        return self.gemm(dy, matrices_of(weight), segments)


GROUPED = GroupedGemms(gemm_grouped, add_products_grouped_)
"""Grouped GEMMs that each run as a single kernel for all experts. The kernel reads the row counts from device
memory."""

EACH = GroupedGemms(gemm_each, add_each_product_)
"""Grouped GEMMs that run one GEMM per expert. The host splits the rows of each operand into one tensor per expert."""


def matrices_of(weight: Tensor) -> Tensor:
    """Flatten the output dims of a weight: [experts, ..., in] -> [experts, out, in]."""
    return weight.view(weight.shape[0], -1, weight.shape[-1])
