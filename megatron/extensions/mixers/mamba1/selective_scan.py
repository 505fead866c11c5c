"""The selective scan of Mamba-1 (arXiv 2312.00752, section 3).

Each channel has a state h [n]. For each token, the state is first multiplied elementwise by the token's decays. The
product of the token's B and input x is then added to the state. Finally, the output is the dot product of the state and
the token's C:

    state:   h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t
    output:  y_t = C_t . h_t

The elements of a channel's state have different decay rates, so the recurrence cannot be computed by matrix products.
Instead, the tokens are divided into chunks. The recurrence first runs in all chunks in parallel, with a zero state at
the start of each chunk. A sequential pass over the chunks then adds the contributions of earlier chunks. In total, s
tokens need about 2 sqrt(s) sequential operations. The backward pass processes a few channels at a time. For these
channels, the states are recomputed, and the adjoint recurrence then runs from the last token to the first.

Shapes: x, dt [s, b, c]; a [c, n] < 0; B, C [s, b, n]; state [b, c, n]. For 16-bit operands, everything is computed in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.torch_private import AutogradContext

MOST_STATES = 2**26
"""Largest number of state elements, counted over all tokens, that are in memory at the same time."""


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, number: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the outputs of the selective scan and the state after the last token.

    Args:
        x: [s, b, c], inputs.
        dt: [s, b, c], step sizes.
        a: [c, n], negative decay rates.
        B: [s, b, n], vectors by which the inputs x are multiplied before they are added to the state.
        C: [s, b, n], vectors by which the state is multiplied to compute the outputs.
        number: [s, b], index of each token's document within its sample, from 0; 0 for tokens that continue the
            document of `state`; None if there is only one document.
        state: [b, c, n], initial state; None for zeros.

    Returns:
        The outputs y [s, b, c], and the state [b, c, n] after the last token. Both tensors are fp32, or fp64 for fp64
        operands.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dt, a, B, C = (t.to(wide) for t in (x, dt, a, B, C))
    state = x.new_zeros(*x.shape[1:], a.shape[-1]) if state is None else state.to(wide)
    begins = None if number is None else torch.cat((number[:1] > 0, number[1:] != number[:-1]))
    return _SelectiveScan.apply(x, dt, a, B, C, begins, state)


def recurrence(decay: Tensor, written: Tensor, state: Tensor) -> Tensor:
    """Return the states h [s, ...] of the recurrence h_t = decay_t h_{t-1} + written_t. `decay` and `written` are [s,
    ...]. `state` [...] is the state before the first token."""
    size = next(size for size in range(isqrt(len(decay)), 0, -1) if len(decay) % size == 0)
    reach, found = (x.unflatten(0, (-1, size)).clone() for x in (decay, written))
    for t in range(1, size):
        found[:, t].addcmul_(reach[:, t], found[:, t - 1])
        reach[:, t].mul_(reach[:, t - 1])
    for chunk, of_chunk in zip(found, reach, strict=True):
        chunk.addcmul_(of_chunk, state)
        state = chunk[-1]
    return found.flatten(0, 1)


def adjoint(decay: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of the argument `written` of `recurrence`. `grad` is the gradient of the states h. The result
    is computed by a recurrence from the last token to the first."""
    later = torch.cat((torch.zeros_like(decay[:1]), decay[1:].flip(0)))
    return recurrence(later, grad.flip(0), torch.zeros_like(grad[0])).flip(0)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        B: Tensor,
        C: Tensor,
        begins: Tensor | None,
        state: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dt, a, B, C, begins, state)
        y, final = torch.empty_like(x), torch.empty_like(state)
        for part in _parts(x, C):
            _, states = _states(part, x, dt, a, B, C, begins, state)
            y[..., part] = (states @ C.unsqueeze(-1)).squeeze(-1)
            final[:, part] = states[-1]
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor | None, ...]:
        operands = ctx.saved_tensors
        x, dt, a, B, C, _, state = operands
        grads = [torch.empty_like(t) for t in (x, dt, a, state)]
        of_x, of_dt, of_a, of_state = grads
        of_b, of_c = torch.zeros_like(B), torch.zeros_like(C)
        for part in _parts(x, C):
            decay, states = _states(part, *operands)
            own = grad_y[..., part, None] * C.unsqueeze(-2)
            own[-1] += grad_final[:, part]
            of_written = adjoint(decay, own)
            read = (of_written @ B.unsqueeze(-1)).squeeze(-1)  # `read` is the gradient of dt * x
            of_decay = of_written * decay * torch.cat((state[:, part].unsqueeze(0), states[:-1]))
            of_x[..., part] = read * dt[..., part]
            of_dt[..., part] = read * x[..., part] + (of_decay * a[part]).sum(-1)
            of_a[part] = (of_decay * dt[..., part, None]).sum((0, 1))
            of_state[:, part] = of_written[0] * decay[0]
            of_b += ((dt * x)[..., None, part] @ of_written).squeeze(-2)
            of_c += (grad_y[..., None, part] @ states).squeeze(-2)
        return of_x, of_dt, of_a, of_b, of_c, None, of_state


def _parts(x: Tensor, C: Tensor) -> Iterator[slice]:
    """Yield the slices into which the channels are divided. The states of all channels in a slice are computed
    together."""
    size = max(1, MOST_STATES // max(1, C.numel()))
    return (slice(first, first + size) for first in range(0, x.shape[-1], size))


def _states(
    part: slice, x: Tensor, dt: Tensor, a: Tensor, B: Tensor, C: Tensor, begins: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return two tensors [s, b, channels in part, n]: the decays of the channels in the slice `part`, and the states of
    these channels after each token."""
    decay = (dt[..., part, None] * a[part]).exp()
    if begins is not None:
        decay = decay.masked_fill(begins[..., None, None], 0.0)
    written = (dt * x)[..., part, None] * B.unsqueeze(-2)
    return decay, recurrence(decay, written, state[:, part])
