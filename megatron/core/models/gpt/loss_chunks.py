"""Computes the head and the loss of a micro-batch in chunks of tokens (--loss-chunk-tokens).

The logits of a large vocabulary are the largest tensor of a pass. Losses are sums over tokens and the initial gradient
is known in advance, so the gradient of a token's loss can be computed as soon as the token's logits are available. For
each chunk, the forward pass computes the logits, the losses and the gradients of the hidden states and the weight.
After each chunk, the forward pass frees the logits of the chunk. Chunks cause no additional computation: like separate
forward and backward passes, they need three matrix products per token. The only large tensor that remains in memory is
the gradient of the hidden states, which the backward pass returns.

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
    """Output layer and loss function of a chunked loss, and the size of the chunks."""

    head: Head
    loss: Loss
    chunk_tokens: int
    """Number of tokens per chunk (--loss-chunk-tokens), including the tokens gathered from other ranks."""


class Tokens(NamedTuple):
    """Labels, mask and gradient of the tokens for which a chunked loss is computed."""

    labels: Tensor
    """[s, b]"""

    mask: Tensor
    """[s, b]"""

    gradient: Tensor | float
    """Gradient of the loss sum with which the backward pass will start."""


def loss_sum_in_chunks(setup: Chunking, tokens: Tokens, x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss sum and losses in chunks.

    x [s, b, h], or [s/tp, b, h] under sequence parallelism, is the input of the output layer. Returns the scalar sum of
    mask * loss, and the losses [s, b] without gradients.
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
        """Return the gradients that the forward pass computed for `ctx.gradient`. If the gradient `grad` from autograd
        differs from `ctx.gradient`, scale the returned gradients. Gradients that are already in `main_grad` cannot be
        scaled, so a different `grad` is an error in this case."""
        computed_for = torch.as_tensor(ctx.gradient, dtype=grad.dtype, device=grad.device)
        if ctx.in_main_grad:
            message = "the gradient of the loss sum differs from the one with which its chunks were computed"
            assert_async(torch.isclose(grad, computed_for, rtol=1e-3), message)
            return *ctx.saved_tensors, None, None
        ratio = torch.where(computed_for == 0, 1, grad / computed_for)
        scaled = [None if each is None else each * ratio.to(each.dtype) for each in ctx.saved_tensors]
        return *scaled, None, None


class _Chunks:
    """State that is kept while a micro-batch's loss is computed chunk by chunk. In shapes, t is the number of ranks
    that shard the sequence of x."""

    def __init__(self, setup: Chunking, tokens: Tokens, x: Tensor, needs: tuple[bool, bool, bool]) -> None:
        """Prepare the pass. `needs` contains three bools: whether the gradients of x, the weight and the bias are
        needed."""
        self.head, self.loss = setup.head, setup.loss
        self.gradient = tokens.gradient
        self.x = x.contiguous().view(-1, x.shape[-1])  # [n, h], hidden states of this rank's tokens
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
        """Return the gradient of the bias; None if it is not needed."""
        bias = self.head.bias
        return self.sum_of_dy.to(bias.dtype) if self.sum_of_dy is not None and bias is not None else None

    def run(self, dw: Tensor | None = None, overwrite: bool = False) -> Tensor:
        """Compute all chunks, and return the losses [s, b]. The weight gradient is added to `dw`, or overwrites
        `dw`."""
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
        """Return an empty tensor that requires a gradient. The function that computes the logits receives this tensor
        as an additional input, so that autograd tracks the logits although their other inputs require no gradients."""
        return self.x.new_empty(0).requires_grad_(self.tracked)

    def logits(self, x: Operand) -> Tensor:
        """x [n, 1, h] -> [n, 1, V/t]"""
        bias = self.head.bias
        return PLAIN.forward(x, self.head.weight, None if bias is None else bias.flatten())

    def add_gradients(self, rows: slice, x: Operand, dy: Tensor, dw: Tensor | None, overwrite: bool) -> None:
        """Compute a chunk's input, weight and bias gradients from the gradient of its logits.

        Args:
            rows: Rows of this rank's tokens that belong to the chunk.
            x: Input of the output layer for the tokens of the chunk.
            dy: Gradient of the logits [n, 1, V/t].
            dw: Tensor to which the weight gradient is added; None if it is not needed.
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
    """Compute a chunk's logits; the backward pass passes their gradient to `_Chunks.add_gradients`."""

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
