"""The state-space model of Mamba-2, step by step and in chunks (SSD, arXiv 2405.21060, section 6).

Each head has a state S [n, p]. A token lets it decay, adds its input x at its B, and reads the state at its C:

    S_t = exp(dt_t A) S_{t-1} + dt_t B_t x_tᵀ         y_t = S_tᵀ C_t

The chunked form computes the same with matrix products. With L_ij = exp(sum of dt A over tokens j + 1 .. i) for j <= i,
and r_i the same from the chunk's first token on, the tokens of a chunk read

    Y = ((C Bᵀ) * L) diag(dt) X + diag(r) C S

where S is the state before the chunk. Only the states pass from chunk to chunk. Where a document begins, decay is
total: every factor that reaches over the first token of a document is 0.

Shapes: x [s, b, heads, p]; dt [s, b, heads] > 0; a [heads] < 0; B, C [s, b, groups, n]. The heads of a group are
adjacent. 16-bit operands are computed in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.tensor_parallel.layers import Hardware
from megatron.core.torch_private import AutogradContext
from megatron.extensions.mixers.linear_attention.gated_delta_rule import (
    Chunks,
    decayed,
    decays,
    in_chunks,
    numbers_in_chunks,
)

CHUNKS = Chunks(128)


def ssd_steps(
    x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, number: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token by token; for a few tokens, and to check `ssd_chunks`, whose arguments and results these are."""
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
    """In chunks of tokens: y [s, b, heads, p] and the state [b, heads, n, p] behind the last token, both in
    fp32, or fp64 for fp64 operands.

    `number` [s, b] counts the documents that have begun, 0 for tokens of the document that `state` is of; None for one
    document. Without a state it is zero.
    """
    groups, width = B.shape[2], x.shape[-1]
    hardware = chunks.hardware
    written, g, B, C = region(_operands, hardware.compiled)(x, dt, a, B, C, min(chunks.tokens, len(x)))
    numbers = None if number is None else numbers_in_chunks(number, written.shape[-2])
    total, reach, left = decays(g.squeeze(-1), numbers)
    kept = B.squeeze(3).mT @ region(_weighted_columns, hardware.compiled)(written, left)
    kept = kept.unflatten(-1, (-1, width))  # [chunks, b, groups, n, heads of a group, p]
    if state is None:
        state = kept.new_zeros(*x.shape[1:3], B.shape[-1], width)
    state = state.to(kept.dtype).unflatten(1, (groups, -1)).transpose(2, 3)
    states, final = _Scan.apply(hardware, kept, reach[..., -1:, :].transpose(3, 4), state)
    out = region(decayed, hardware.compiled)(C @ B.mT, total, numbers) @ written
    read = (C.squeeze(3) @ states.flatten(-2)).unflatten(-1, (-1, width))
    return region(_summed, hardware.compiled)(out, read, reach)[: len(x)], final.transpose(2, 3).flatten(1, 2)


def _operands(x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """x dt, dt a, B and C in chunks, see `in_chunks`"""
    groups, wide = B.shape[2], torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    dt = dt.to(wide)
    a = a.to(wide)
    return tuple(in_chunks(t, wide, chunk, groups) for t in (x * dt.unsqueeze(-1), dt * a, B, C))


def _weighted_columns(written: Tensor, left: Tensor) -> Tensor:
    """written [chunks, b, groups, heads of a group, chunk, p] times left -> [chunks, b, groups, chunk, heads * p]"""
    return _columns(written * left).flatten(-2)


def _summed(out: Tensor, read: Tensor, reach: Tensor) -> Tensor:
    """What tokens have from their chunk [chunks, b, groups, heads of a group, chunk, p] and from the state before it
    [chunks, b, groups, chunk, heads of a group, p] -> [chunks * chunk, b, heads, p]"""
    out = _columns(out) + read * reach.transpose(3, 4)
    return out.permute(0, 3, 1, 2, 4, 5).flatten(0, 1).flatten(2, 3)


def _columns(x: Tensor) -> Tensor:
    """x [..., heads of a group, chunk, p] -> [..., chunk, heads of a group, p]: columns of one product for a group"""
    return x.transpose(3, 4)


class ScanContext(AutogradContext):
    hardware: Hardware


class _Scan(torch.autograd.Function):
    """States from chunk to chunk: S_{c+1} = r_c S_c + K_c. Returns all S but the last one, and that apart."""

    # kept K [chunks, b, groups, n, heads of a group, p], carried r [chunks, b, groups, 1, heads of a group, 1],
    # state S [b, groups, n, heads of a group, p] -> [chunks, b, groups, n, heads of a group, p], one without chunks
    @staticmethod
    def forward(
        ctx: ScanContext, hardware: Hardware, kept: Tensor, carried: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        states = kept.new_empty(len(kept) + 1, *state.shape)
        states[0] = state
        for c in hardware.each(range(len(kept))):
            torch.addcmul(kept[c], states[c], carried[c], out=states[c + 1])
        states, final = states[:-1], states[-1].clone()
        ctx.hardware = hardware
        ctx.save_for_backward(carried, states)
        return states, final

    @staticmethod
    @once_differentiable
    def backward(ctx: ScanContext, grad_states: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        carried, states = ctx.saved_tensors
        grads = states.new_empty(len(states) + 1, *grad.shape)
        grads[-1] = grad
        for c in ctx.hardware.each(range(len(states) - 1, -1, -1)):
            torch.addcmul(grad_states[c], grads[c + 1], carried[c], out=grads[c])
        return None, grads[1:], (grads[1:] * states).sum((3, 5), keepdim=True), grads[0]
