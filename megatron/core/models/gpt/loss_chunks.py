"""Chunked loss: computes the output layer and the loss of a micro-batch in chunks of tokens (--loss-chunk-tokens).

If the vocabulary is large, the logits are the largest tensor of a forward pass. The loss is a sum over tokens and its
initial gradient is known in advance, so the gradient of a token's loss can be computed as soon as the token's logits
are available. For each chunk, the forward pass computes the logits, the losses and the gradients of the hidden states
and the weight. The forward pass then frees the logits of the chunk. Chunking causes no additional computation: both
with and without chunks, each token needs three matrix products. The only large tensor that remains in memory is the
gradient of the hidden states, which the backward pass returns.

Under sequence parallelism, a chunk consists of the same rows of each rank's sequence shard. The hidden states of a
chunk are gathered while the previous chunk is computed. The gradient of a chunk's hidden states is reduced while the
next chunk is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from megatron.core.collectives import Pending
from megatron.core.config.losses import Loss
from megatron.core.models.gpt.loss import Head, checked_losses, masked_sum
from megatron.core.tensor_parallel.layers import enter, entered
from megatron.core.tensor_parallel.linear_gemms import PLAIN, Operand, matrix_of
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad
from megatron.core.torch_private import AutogradContext, assert_async


class Chunking(NamedTuple):
    """Settings of a chunked loss: the output layer, the loss function and the chunk size."""

    head: Head
    loss: Loss
    chunk_tokens: int
    """Maximum number of tokens per chunk (--loss-chunk-tokens). Tokens that are gathered from other ranks are
    included."""


class Tokens(NamedTuple):
    """Labels and loss mask of the tokens of a micro-batch, and the initial gradient of the loss sum."""

    labels: Tensor
    """[s, b]"""

    mask: Tensor
    """[s, b]"""

    gradient: Tensor | float
    """Gradient with respect to the loss sum. Autograd is expected to start the backward pass with this gradient."""


def loss_sum_in_chunks(setup: Chunking, tokens: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the losses of a micro-batch, and their sum, in chunks of tokens.

    `x` is the input of the output layer, [s, b, h], or [s/tp, b, h] under sequence parallelism. The function returns
    the scalar sum of mask * loss, and the losses [s, b], which are not differentiable.
    """
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(x, setup.head.weight, setup.head.bias, setup, tokens)
    losses = _Chunks(setup, tokens, x, (False, False, False)).run()
    return masked_sum(losses, tokens.mask.t()), losses


class _ChunkedContext(AutogradContext):
    gradient: Tensor | float
    in_main_grad: bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _ChunkedContext, x: Tensor, weight: Tensor, bias: Tensor | None, setup: Chunking, tokens: Tokens
    ) -> tuple[Tensor, Tensor]:
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        chunks = _Chunks(setup, tokens, x, (needs_dx, needs_dw, needs_db))
        dw = accumulate_weight_grad(weight, chunks.run) if needs_dw else None
        if not needs_dw:
            chunks.run()
        ctx.save_for_backward(chunks.dx, dw, chunks.db)
        ctx.gradient, ctx.in_main_grad = tokens.gradient, needs_dw and dw is None
        losses = chunks.losses
        ctx.mark_non_differentiable(losses)
        return masked_sum(losses, tokens.mask.t()), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: _ChunkedContext, grad: Tensor, of_losses: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that the forward pass computed under the assumption that the gradient of the loss sum is
        `ctx.gradient`. If autograd passes a different gradient `grad`, scale the returned gradients by `grad /
        ctx.gradient`. A weight gradient that the forward pass has already added to `main_grad` cannot be scaled, so a
        different `grad` is an error in this case."""
        computed_for = torch.as_tensor(ctx.gradient, dtype=grad.dtype, device=grad.device)
        if ctx.in_main_grad:
            message = "the gradient of the loss sum differs from the one with which its chunks were computed"
            assert_async(torch.isclose(grad, computed_for, rtol=1e-3), message)
            return *ctx.saved_tensors, None, None
        ratio = torch.where(computed_for == 0, 1, grad / computed_for)
        scaled = [None if each is None else each * ratio.to(each.dtype) for each in ctx.saved_tensors]
        return *scaled, None, None


class _Chunks:
    """State of the computation of a micro-batch's loss in chunks. In shapes, t is the number of ranks over which the
    sequence dim of x is sharded."""

    def __init__(self, setup: Chunking, tokens: Tokens, x: Tensor, needs: tuple[bool, bool, bool]) -> None:
        """Prepare the computation. The three elements of `needs` state whether the gradients of x, of the weight and of
        the bias are needed."""
        self.head, self.loss = setup.head, setup.loss
        self.gradient = tokens.gradient
        self.x = x.contiguous().view(-1, x.shape[-1])  # hidden states of this rank's tokens [n, h]
        shards = self.head.axis.size if self.head.boundary.cuts.sequence else 1
        self.labels, self.mask = (each.reshape(shards, -1) for each in tokens[:2])  # [t, n]
        length = max(1, setup.chunk_tokens // shards)
        count = -(-len(self.x) // length)
        self.starts = [len(self.x) * k // count for k in range(count + 1)]
        self.tracked = any(needs)
        self.dx = torch.empty_like(x) if needs[0] else None
        self.losses = torch.empty(0)  # [s, b]
        self.shape = tokens.labels.shape
        bias = self.head.bias
        wide = None if bias is None else torch.promote_types(bias.dtype, torch.float32)
        self.sum_of_dy = torch.zeros_like(bias, dtype=wide) if needs[2] and bias is not None else None
        self.reducing: tuple[slice, Pending] | None = None

    @property
    def db(self) -> Tensor | None:
        """Gradient of the bias, or None if the gradient is not needed."""
        bias = self.head.bias
        return self.sum_of_dy.to(bias.dtype) if self.sum_of_dy is not None and bias is not None else None

    def run(self, dw: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """Compute all chunks, and return the losses [s, b]. Add the weight gradient to `dw`, or overwrite `dw` with the
        weight gradient if `overwrite` is True."""
        gathered = self._enter(0)
        losses = []
        for number in range(len(self.starts) - 1):
            x = entered(gathered)
            gathered = self._enter(number + 1) if number + 2 < len(self.starts) else []
            losses.append(self._chunk(number, x, dw, overwrite and number == 0))
            del x
        self._take_reduced()
        self.losses = torch.cat(losses, dim=1).view(self.shape)
        return self.losses

    def _rows(self, number: int) -> slice:
        return slice(self.starts[number], self.starts[number + 1])

    def _enter(self, number: int) -> list[Pending]:
        return enter((self.x[self._rows(number)].unsqueeze(1),), self.head.boundary, self.head.axis)

    def _chunk(self, number: int, x: Operand, dw: Tensor | None, overwrite: bool) -> Tensor:
        """Compute the losses of a chunk, and all gradients that are needed: x [t * n, 1, h] -> losses [t, n]."""
        rows = self._rows(number)
        labels = self.labels[:, rows].reshape(-1, 1)
        with torch.set_grad_enabled(self.tracked):
            logits = _Logits.apply(self._anchor(), x, self, rows, dw, overwrite)
            losses = checked_losses(self.loss(self.head.finished(logits), labels), labels.shape)
            del logits
        if self.tracked:
            weights = self.mask[:, rows].reshape(-1, 1).to(losses.dtype) * self.gradient
            # Start from a graph edge instead of a tensor, as the pipeline executor does, so that torch function modes
            # see the calls of the backward pass.
            torch.autograd.backward([get_gradient_edge(losses)], [weights])
        return losses.detach().view(len(self.labels), -1)

    def _anchor(self) -> Tensor:
        """Return an empty tensor that requires a gradient. The tensor is an additional input of `_Logits`. Without it,
        autograd would not track the logits, because no other input of `_Logits` requires a gradient."""
        return self.x.new_empty(0).requires_grad_(self.tracked)

    def logits(self, x: Operand) -> Tensor:
        """x [n, 1, h] -> [n, 1, V/t]"""
        bias = self.head.bias
        return PLAIN.forward(x, self.head.weight, None if bias is None else bias.flatten())

    def add_gradients(self, rows: slice, x: Operand, dy: Tensor, dw: Tensor | None, overwrite: bool) -> None:
        """Compute a chunk's input, weight and bias gradients from the gradient of its logits.

        Args:
            rows: Range of this rank's tokens that belong to the chunk.
            x: Input of the output layer for the tokens of the chunk.
            dy: Gradient of the logits [n, 1, V/t].
            dw: Tensor to which the weight gradient is added, or None if the weight gradient is not needed.
            overwrite: Whether the weight gradient overwrites `dw` instead of being added to it.
        """
        if self.dx is not None:
            dx = self.head.boundary.enter_adjoint(PLAIN.input_grad((dy,), self.head.weight), self.head.axis)
            self._take_reduced()
            self.reducing = rows, dx
        if dw is not None:
            PLAIN.add_weight_grad_(matrix_of(dw), (dy,), x, overwrite)
        if self.sum_of_dy is not None:
            self.sum_of_dy += dy.flatten(0, 1).sum(0, dtype=self.sum_of_dy.dtype)

    def _take_reduced(self) -> None:
        if self.reducing is not None:
            assert self.dx is not None
            rows, dx = self.reducing
            self.dx.view(self.x.shape)[rows] = dx.wait().flatten(0, 1)
            self.reducing = None


class _LogitsContext(AutogradContext):
    chunk: tuple[_Chunks, slice, Operand, Tensor | None, bool]


class _Logits(torch.autograd.Function):
    """Autograd function that computes a chunk's logits. The backward method passes the gradient of the logits to
    `_Chunks.add_gradients`."""

    @staticmethod
    def forward(
        ctx: _LogitsContext,
        anchor: Tensor,
        x: Operand,
        chunks: _Chunks,
        rows: slice,
        dw: Tensor | None,
        overwrite: bool,
    ) -> Tensor:
        ctx.chunk = chunks, rows, x, dw, overwrite
        return chunks.logits(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: _LogitsContext, dy: Tensor) -> tuple[None, ...]:
        chunks, rows, x, dw, overwrite = ctx.chunk
        chunks.add_gradients(rows, x, dy, dw, overwrite)
        return (None,) * 6
