"""The state-space model of Mamba-2, computed token by token and in chunks (SSD, arXiv 2405.21060, section 6).

Each head has a state S [n, p]. For each token, the state is first multiplied by the token's decay. The outer product of
the token's B and input x is then added to the state. Finally, the output is the product of the state and the token's C:

    state:   S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ
    output:  y_t = S_tᵀ C_t

The chunked form computes the same results with matrix products. Let L_ij be the decay from token j to token i: L_ij =
exp(sum of dt A over tokens j + 1 .. i) for j <= i. Let r_i be the decay from the start of the chunk to token i: r_i =
exp(sum of dt A from the chunk's first token to token i). The outputs of a chunk are

    Y = ((C Bᵀ) * L) diag(dt) X + diag(r) C S

S is the state before the chunk. Only the state is passed from one chunk to the next. The state is reset at the first
token of each document: every decay factor between tokens of different documents is 0.

Shapes: x [s, b, heads, p]; dt [s, b, heads] > 0; a [heads] < 0; B, C [s, b, groups, n]. The heads of a group are
adjacent.

For fp16 operands, everything is computed in fp32. For bf16 operands, matrix products are multiplied in bf16 and summed
in fp32, as in the kernels of arXiv 2405.21060. The operands x, B and C are bf16 already and are not rounded. The
following quantities are rounded to bf16 with a relative error of u = 2^-8: the matrix of weights in a chunk, ((C Bᵀ) *
L) diag(dt), which also contains the factor D on its diagonal; diag(dt) X, the inputs that a chunk adds to the state;
the states that tokens read; and the two terms of Y. The recurrence of the states, including the decays, is computed in
fp32. Let Y* and S* be the outputs and states that are computed from the absolute values |x|, |B| and |C|. The error of
an output is then at most ((1 + u)^3 - 1) Y*, and the error of a state is at most u S*, in addition to fp32 rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.batched_gemms import multiply, product
from megatron.core.compiled_regions import region
from megatron.core.tensor_parallel.layers import Hardware
from megatron.core.torch_private import AutogradContext
from megatron.extensions.mixers.linear_attention.gated_delta_rule import (
    Chunks,
    decays,
    in_chunks,
    numbers_in_chunks,
)

CHUNKS = Chunks(128)


def ssd_steps(
    x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, number: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the state-space model one token at a time. The function is used if there are only a few tokens, and as a
    reference for `ssd_chunks`. The arguments and results are the same as for `ssd_chunks`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    dt = dt.to(wide)
    a = a.to(wide)
    B, C = (t.to(wide).repeat_interleave(x.shape[2] // B.shape[2], dim=2) for t in (B, C))
    state = x.new_zeros(*x.shape[1:3], B.shape[-1], x.shape[-1]) if state is None else state.to(wide)
    decay, out = (dt * a).exp(), []
    if number is not None:
        begins = torch.cat((number[:1] > 0, number[1:] != number[:-1]))
        decay = decay.masked_fill(begins.unsqueeze(-1), 0.0)
    for t in range(len(x)):
        written = (dt[t].unsqueeze(-1) * B[t]).unsqueeze(-1) * x[t].unsqueeze(-2)
        state = state * decay[t, ..., None, None] + written
        out.append((state * C[t].unsqueeze(-1)).sum(-2))
    return torch.stack(out), state


def ssd_chunks(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    B: Tensor,
    C: Tensor,
    number: Tensor | None = None,
    state: Tensor | None = None,
    chunks: Chunks = CHUNKS,
) -> tuple[Tensor, Tensor]:
    """Run the state-space model in chunks of tokens.

    Args:
        x: [s, b, heads, p], inputs.
        dt: [s, b, heads], step sizes.
        a: [heads], negative decay rates.
        B: [s, b, groups, n], vectors by which the inputs x are multiplied before they are added to the state.
        C: [s, b, groups, n], vectors by which the state is multiplied to compute the outputs.
        number: [s, b], index of each token's document within its sample, from 0; 0 for tokens that continue the
            document of `state`; None if there is only one document.
        state: [b, heads, n, p], initial state; None for zeros.
        chunks: Settings for the division into chunks.

    Returns:
        The outputs y [s, b, heads, p], and the state [b, heads, n, p] after the last token. Both tensors are fp32, or
            fp64 for fp64 operands.
    """
    operands = region(operands_in_chunks, chunks.hardware.compiled)(x, dt, a, B, C, min(chunks.tokens, len(x)))
    y, final = ssd_of_chunks(operands, number, state, chunks.hardware, None, operands[1].dtype)
    return y if len(y) == len(x) else y[: len(x)], final


def ssd_of_chunks(
    operands: Sequence[Tensor],
    number: Tensor | None,
    state: Tensor | None,
    hardware: Hardware,
    direct: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Run the state-space model on operands that are already divided into chunks. Return y and the state after the last
    token. Unlike the outputs of `ssd_chunks`, y includes the padding of the last chunk.

    Args:
        operands: Operands that `operands_in_chunks` returns.
        number: [s, b], index of each token's document within its sample, from 0; None if there is only one document.
        state: [b, heads, n, p], initial state; None for zeros.
        hardware: Settings that determine whether functions are compiled and how the loop over chunks runs.
        direct: [heads], factors D; None for no factors. The inputs x, multiplied by D, are added to y.
        dtype: Dtype of y.
    """
    x, dt, g, B, C = operands
    _, samples, groups, heads, chunk, width = x.shape
    numbers = None if number is None else numbers_in_chunks(number, chunk)
    total, reach, left = decays(g.squeeze(-1), numbers)
    if state is None:
        state = torch.zeros(samples, groups * heads, B.shape[-1], width, dtype=dt.dtype, device=x.device)
    state = state.to(dt.dtype).unflatten(1, (groups, -1)).transpose(2, 3)
    weighted = region(_weighted_columns, hardware.compiled)(x, dt, left)
    carried = reach[..., -1:, :].transpose(3, 4)
    states, final = _Scan.apply(hardware, B.squeeze(3).mT, weighted, carried, state)
    products = multiply(C, B.mT, x.dtype, dt.dtype)
    scores = region(_scores, hardware.compiled)(products, total, dt, direct, numbers, x.dtype)
    read = multiply(C.squeeze(3), states.flatten(-2), x.dtype, x.dtype).unflatten(-1, (-1, width))
    out = multiply(scores, x, x.dtype, x.dtype)
    y = region(_summed, hardware.compiled)(out, read, reach, dtype)
    return y, final.transpose(2, 3).flatten(1, 2)


def operands_in_chunks(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Divide x, dt, dt * a, B and C into chunks as `in_chunks` describes, and return all five. If x is bf16, x, B and C
    stay bf16. All other results are fp32 or fp64.

    Args:
        x: [s, b, heads, p], inputs.
        dt: [s, b, heads], step sizes.
        a: [heads], negative decay rates.
        B: [s, b, groups, n], vectors by which the inputs x are multiplied before they are added to the state.
        C: [s, b, groups, n], vectors by which the state is multiplied to compute the outputs.
        chunk: Tokens per chunk.
    """
    groups, wide = B.shape[2], torch.promote_types(x.dtype, torch.float32)
    own = x.dtype if x.dtype == torch.bfloat16 else wide
    dt = dt.to(wide)
    dtypes = (own, wide, wide, own, own)
    return tuple(
        in_chunks(t, dtype, chunk, groups) for t, dtype in zip((x, dt, dt * a.to(wide), B, C), dtypes, strict=True)
    )


def _weighted_columns(x: Tensor, dt: Tensor, left: Tensor) -> Tensor:
    """Multiply x [chunks, b, groups, heads of a group, chunk, p] by the step sizes dt and by `left`, the decay from
    each token to the end of the chunk. Return the product [chunks, b, groups, chunk, heads of a group * p] in the dtype
    of x."""
    return _columns(x * (dt * left)).flatten(-2).to(x.dtype)


def _scores(
    products: Tensor, total: Tensor, dt: Tensor, direct: Tensor | None, number: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """For all pairs of tokens in a chunk, compute the weight of the input of token j in the output of token i. The
    weights [..., heads, i, j] are ((C Bᵀ) * L) diag(dt) + diag(direct) in `dtype`. `products` [..., 1, i, j] contains C
    Bᵀ of each group. `total` [..., heads, i] is the first result of `decays`, from which L is computed. `dt` [...,
    heads, j, 1] contains the step sizes."""
    later = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).triu(1)
    change = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf)
    if number is not None:
        number = number[..., 1:]
        change = change.masked_fill(number.unsqueeze(-1) != number.unsqueeze(-2), -torch.inf)
    scores = products * change.exp() * dt.mT
    if direct is not None:
        own = torch.eye(len(later), dtype=scores.dtype, device=scores.device)
        scores = scores + direct.to(scores.dtype).view(scores.shape[2], -1, 1, 1) * own
    return scores.to(dtype)


def _summed(out: Tensor, read: Tensor, reach: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the two terms of the outputs, and return the sums [chunks * chunk, b, heads, p]. `out` [chunks, b, groups,
    heads of a group, chunk, p] is the term from the tokens of the same chunk. `read` [chunks, b, groups, chunk, heads
    of a group, p] is the term from the state before the chunk."""
    out, read = (_ContiguousGradient.apply(term) for term in (out, read))
    out = _columns(out) + read * reach.transpose(3, 4)
    return out.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).flatten(2, 3).to(dtype)


class _ContiguousGradient(torch.autograd.Function):
    """Autograd function that returns x unchanged. In the backward pass, the gradient of x is made contiguous, so that a
    compiled function writes the gradient in the memory layout that the following matrix products need."""

    @staticmethod
    def forward(ctx: AutogradContext, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad: Tensor) -> Tensor:
        return grad.contiguous()


def _columns(x: Tensor) -> Tensor:
    """Transpose x [..., heads of a group, chunk, p] to [..., chunk, heads of a group, p], so that the heads of a group
    become columns of a single matrix product."""
    return x.transpose(3, 4)


class ScanContext(AutogradContext):
    hardware: Hardware


class _Scan(torch.autograd.Function):
    """Autograd function of the recurrence S_{c+1} = r_c S_c + Bᵀ X over chunks c. The function returns two tensors: the
    states before each chunk, in the dtype of B, and the state after the last chunk."""

    # Arguments: `keys` [chunks, b, groups, n, chunk] is Bᵀ, `columns` [chunks, b, groups, chunk, heads of a group * p]
    # is X in the dtype of B, `carried` [chunks, b, groups, 1, heads of a group, 1] is r, and `state` [b, groups, n,
    # heads of a group, p] is the initial state S_0. Results: states before each chunk [chunks, b, groups, n, heads of a
    # group, p], and final state [b, groups, n, heads of a group, p].
    @staticmethod
    def forward(
        ctx: ScanContext, hardware: Hardware, keys: Tensor, columns: Tensor, carried: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        kept = product(keys, columns, state.dtype).unflatten(-1, state.shape[-2:])
        states = kept.new_empty(len(kept) + 1, *state.shape)
        states[0] = state
        for c in hardware.each(range(len(kept))):
            torch.addcmul(kept[c], states[c], carried[c], out=states[c + 1])
        states, final = states[:-1], states[-1].clone()
        ctx.hardware = hardware
        ctx.save_for_backward(keys, columns, carried, states)
        return states.to(keys.dtype), final

    @staticmethod
    @once_differentiable
    def backward(ctx: ScanContext, grad_states: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        keys, columns, carried, states = ctx.saved_tensors
        grads = states.new_empty(len(states) + 1, *grad.shape)
        grads[-1] = grad
        for c in ctx.hardware.each(range(len(states) - 1, -1, -1)):
            torch.addcmul(grad_states[c], grads[c + 1], carried[c], out=grads[c])
        of_kept, of_carried = region(_of_kept, ctx.hardware.compiled)(grads[1:], states, keys.dtype)
        of_keys, of_columns = product(of_kept, columns.mT, keys.dtype), product(keys.mT, of_kept, keys.dtype)
        return None, of_keys, of_columns, of_carried, grads[0]


def _of_kept(grads: Tensor, states: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return two tensors:

    - [chunks, b, groups, n, heads of a group * p], the gradients of the states after each chunk, in `dtype` and with
      heads and channels flattened to columns.
    - [chunks, b, groups, 1, heads of a group, 1], the gradients of the decays by which the states are multiplied
      between chunks.
    """
    return grads.flatten(-2).to(dtype), (grads * states).sum((3, 5), keepdim=True)
