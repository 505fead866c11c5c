"""The embedding of tokens, its vocabulary cut over the tensor-parallel ranks, and the range check of token ids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import Boundary, TPContext, make_parameter, row_boundary
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, add_rows_
from megatron.core.torch_private import AutogradContext, assert_async


def local_rows(rows: int, axis: Axis) -> tuple[int, int]:
    """Returns the vocabulary range [start, stop) that this rank holds."""
    assert rows % axis.size == 0, f"{rows} vocabulary rows do not divide over {axis.size} ranks"
    part = rows // axis.size
    return axis.rank * part, (axis.rank + 1) * part


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Checks that every id is in [0, size). No rank owns any other id: it would silently contribute nothing.

    Raises ValueError on CPU. On a GPU it asserts on the device, as reading the ids would stall the host.
    """
    message = f"{what} must be in [0, {size}), the vocabulary; check --vocab-size and the tokenizer of the data"
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if ids.device.type == "cpu" and not 0 <= int(low) <= int(high) < size:
        raise ValueError(f"{message}: found ids from {int(low)} to {int(high)}")
    if ids.is_cuda:
        assert_async((low >= 0) & (high < size), message)


class EmbeddingContext(AutogradContext):
    elsewhere: Tensor | None
    """Whether another rank has the row of an id."""
    weight: Tensor
    boundary: Boundary
    axis: Axis


class EmbeddingFunction(torch.autograd.Function):
    """Lookup in an embedding table whose rows are sharded: each rank looks up its own ids, zeros stand for the others,
    and the sum over the ranks is the result.

    The gradient is added to `weight.main_grad` row by row, so that no gradient of the table's size is made.
    """

    # ids [s, b] -> [s, b, h], with sequence parallelism [s/t, b, h]; W [V/t, h]
    @staticmethod
    def forward(ctx: EmbeddingContext, ids: Tensor, weight: Tensor, boundary: Boundary, axis: Axis) -> Tensor:
        start, stop = local_rows(weight.shape[0] * axis.size, axis)
        ctx.elsewhere = None
        if axis.size > 1:
            ctx.elsewhere = ((ids < start) | (ids >= stop)).unsqueeze(-1)
            ids = (ids - start).clamp_(0, stop - start - 1)
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.boundary = boundary
        ctx.axis = axis
        rows = F.embedding(ids, weight)
        if ctx.elsewhere is not None:
            rows.masked_fill_(ctx.elsewhere, 0.0)
        return boundary.leave(rows, axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: EmbeddingContext, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        dy = ctx.boundary.leave_adjoint(grad_output, ctx.axis).wait()
        if ctx.elsewhere is not None:
            dy = dy.masked_fill(ctx.elsewhere, 0.0)

        def add_dw_(out: Tensor, overwrite: bool) -> None:
            add_rows_(out.zero_() if overwrite else out, ids.flatten(), dy.flatten(0, -2))

        return None, accumulate_weight_grad(ctx.weight, add_dw_), None, None


class VocabParallelEmbedding(nn.Module):
    """Word embeddings [vocab_rows, hidden], padding included, with sharded rows."""

    backward_reads_parameters = False

    def __init__(self, meta: ParamMeta, ctx: TPContext) -> None:
        super().__init__()
        self.weight = make_parameter(meta, ctx)
        self.vocab_rows = meta.global_shape[0]
        self.axis = ctx.tp
        self.boundary = row_boundary(ctx)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> [s, b, h], or [s/t, b, h] under sequence parallelism; W [V/t, h]. ValueError for an unknown
        token."""
        check_ids(tokens, self.vocab_rows, "token ids")
        return EmbeddingFunction.apply(tokens.t(), self.weight, self.boundary, self.axis)
