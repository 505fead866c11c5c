"""The gated delta rule (Gated DeltaNet, arXiv 2412.06464, equation 10), computed token by token and in chunks.

Each head has a state S [dk, dv], a linear map from keys to values. For each token, the state is first multiplied by the
token's decay. The value that the state stores for the token's key is then moved towards the token's value by the
fraction beta. Finally, the output is the product of the state and the token's query:

    state:   S_t = exp(g_t) S_{t-1} + k_t beta_t (v_t - (exp(g_t) S_{t-1})ᵀ k_t)ᵀ
    output:  o_t = S_tᵀ q_t / sqrt(dk)

The chunked form computes the same results with matrix products (section 3.3; the WY representation of arXiv
2406.06484). Let G_i be the sum of g from the chunk's first token to token i, let D_ij = exp(G_i - G_j) for j <= i, and
let S be the state before the chunk. The values that the tokens of a chunk write to the state are then the rows of U - W
S, where U and W are computed as follows:

    A_ij = beta_i D_ij k_iᵀ k_j  (j < i)      T = (I + A)^-1      U = T diag(beta) V      W = T diag(beta exp(G)) K

Only the state is passed from one chunk to the next. The state is reset at the first token of each document: every decay
factor between tokens of different documents is 0.

Kimi Delta Attention (arXiv 2510.26692) has a decay for each channel of a key: g is [s, b, heads, dk]. In this case, the
matrix A and the scores of queries and keys are sums over channels, and each term is multiplied by the decay of the
channel (`channel_products`).

Shapes: q, k [s, b, key heads, dk]; v [s, b, heads, dv]; g, beta [s, b, heads], g <= 0. The value heads that share a key
head are adjacent.

For 16-bit operands, everything is computed in fp32, except for three matrix products of bf16 operands. These products
are multiplied in bf16 and summed in fp32. The first is the product of keys or queries with keys, whose operands are
bf16 already and are not rounded. The other two are the terms of the output: Q S, the contribution of the state before
the chunk, and (Q Kᵀ * D) (U - W S), the contribution of the chunk's tokens. The four operands of these two products are
rounded to bf16 with a relative error of u = 2^-8. In addition to fp32 rounding, the error of an output is therefore at
most (2 u + u^2) (|Q| |S| + |Q Kᵀ * D| |U - W S|). The states, and the values that tokens write to the states, are
stored in fp32, because rounding errors would accumulate from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.attention.tiles import Documents
from megatron.core.attention.varlen import cumulative_lengths
from megatron.core.batched_gemms import multiply
from megatron.core.compiled_regions import region
from megatron.core.tensor_parallel.layers import HARDWARE, Hardware
from megatron.core.torch_private import AutogradContext

CHUNK = 64
"""Tokens per chunk. Each chunk needs matrix products of size [CHUNK, CHUNK], and a sequence needs s /
CHUNK sequential steps."""


class Chunks(NamedTuple):
    """Settings for the division of a sequence into chunks, which are computed one after another."""

    tokens: int
    """Tokens per chunk."""

    hardware: Hardware = HARDWARE
    """Settings that determine whether functions are compiled and how the loop over chunks runs."""


CHUNKS = Chunks(CHUNK)


def gated_delta_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, number: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule token by token. The function is used if there are only a few tokens, and as a
    reference for `gated_delta_chunks`. The arguments and results are the same as for `gated_delta_chunks`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    repeats = v.shape[2] // k.shape[2]
    q, k = (x.to(wide).repeat_interleave(repeats, dim=2) for x in (q * q.shape[-1] ** -0.5, k))
    v, g, beta = (x.to(wide) for x in (v, g, beta))
    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1]) if state is None else state.to(wide)
    decay, out = (g if g.ndim == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1), []
    if number is not None:
        begins = torch.cat((number[:1] > 0, number[1:] != number[:-1]))
        decay = decay.masked_fill(begins[..., None, None, None], 0.0)
    for t in range(len(q)):
        state = state * decay[t]
        written = (v[t] - (state * k[t].unsqueeze(-1)).sum(-2)) * beta[t].unsqueeze(-1)
        state = state + k[t].unsqueeze(-1) * written.unsqueeze(-2)
        out.append((state * q[t].unsqueeze(-1)).sum(-2))
    return torch.stack(out), state


def gated_delta_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    number: Tensor | None = None,
    state: Tensor | None = None,
    chunks: Chunks = CHUNKS,
) -> tuple[Tensor, Tensor]:
    """Apply the gated delta rule in chunks of tokens.

    Args:
        q: [s, b, key heads, dk], queries.
        k: [s, b, key heads, dk], keys.
        v: [s, b, heads, dv], values.
        g: [s, b, heads], logarithms of decays; [s, b, heads, dk] if each channel has a separate decay.
        beta: [s, b, heads], write strengths.
        number: [s, b], index of each token's document within its sample, from 0; 0 for tokens that continue the
            document of `state`; None if there is only one document.
        state: [b, heads, dk, dv], initial state; None for zeros.
        chunks: Settings for the division into chunks.

    Returns:
        The outputs [s, b, heads, dv], and the state [b, heads, dk, dv] after the last token. Both tensors are fp32, or
            fp64 for fp64 operands.
    """
    length, samples, heads, values = v.shape
    hardware = chunks.hardware
    groups, wide = k.shape[2], torch.promote_types(q.dtype, torch.float32)
    q, k, v, g, beta = region(_operands, hardware.compiled)(q, k, v, g, beta, min(chunks.tokens, length))
    numbers = None if number is None else numbers_in_chunks(number, g.shape[-2])
    if g.shape[-1] > 1:
        keys, scores, reach, left = channel_products(q.to(wide), k.to(wide), g, numbers, hardware.compiled)
    else:
        total, reach, left = decays(g.squeeze(-1), numbers)
        both = torch.stack((k, q))
        products = multiply(both, k.mT.expand(*both.shape[:-2], *k.mT.shape[-2:]), q.dtype, wide)
        keys, scores = region(decayed, hardware.compiled)(products, total, numbers).unbind()
    mixed = keys * beta
    rows = torch.eye(g.shape[-2], dtype=wide, device=v.device).expand(mixed.shape)
    # The solver reads only the entries of `mixed` below the diagonal.
    solved = torch.linalg.solve_triangular(mixed, rows, upper=False, unitriangular=True)
    values_in, keys_in, kept, read_by = region(_weighted, hardware.compiled)(q, k, v, beta, reach, left)
    if state is None:
        state = v.new_zeros(samples, heads, k.shape[-1], values)
    folded = (x.flatten(1, 3) for x in (solved @ values_in, solved @ keys_in, kept, reach[..., -1:, :].mT))
    written, states, final = _Scan.apply(hardware, *folded, state.to(wide).flatten(0, 1))
    written, states = (x.unflatten(1, (samples, groups, -1)) for x in (written, states))
    out = multiply(read_by, states, q.dtype, wide) + multiply(scores, written, q.dtype, wide)
    out = out.permute(0, 4, 1, 2, 3, 5).flatten(0, 1).flatten(2, 3)[:length]
    return out, final.unflatten(0, (samples, heads))


def _operands(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """Scale the queries, and divide all operands into chunks as `in_chunks` describes. bf16 queries and keys stay bf16;
    all other operands are converted to fp32 or fp64."""
    wide, groups = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    own = q.dtype if q.dtype == torch.bfloat16 else wide
    operands, dtypes = (q * q.shape[-1] ** -0.5, k, v, g, beta), (own, own, wide, wide, wide)
    return tuple(in_chunks(x, dtype, chunk, groups) for x, dtype in zip(operands, dtypes, strict=True))


def _weighted(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, reach: Tensor, left: Tensor) -> tuple[Tensor, ...]:
    """Return four tensors: diag(beta) V, diag(beta exp(G)) K, the keys multiplied by the decay from each token to the
    end of the chunk, and the queries multiplied by the decay from the start of the chunk to each token. The caller
    multiplies the first two tensors by T."""
    return v * beta, k * (beta * reach), k * left, (q * reach).to(q.dtype)


def in_chunks(x: Tensor, dtype: torch.dtype, chunk: int, groups: int) -> Tensor:
    """Divide the tokens of x into chunks, and pad the last chunk with zeros. The padding does not change the state.

    Args:
        x: [s, b, n, d] or [s, b, n], tensor to divide into chunks.
        dtype: Dtype of the result.
        chunk: Tokens per chunk.
        groups: Number of groups into which dimension 2 of `x` is divided.

    Returns:
        A contiguous tensor [chunks, b, groups, n / groups, chunk, d or 1].
    """
    x = x if x.ndim == 4 else x.unsqueeze(-1)
    if len(x) % chunk:
        x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -len(x) % chunk))
    x = x.unflatten(0, (-1, chunk)).unflatten(3, (groups, -1)).permute(0, 2, 3, 4, 1, 5)
    return x.to(dtype, memory_format=torch.contiguous_format).contiguous()


def numbers_in_chunks(number: Tensor, chunk: int) -> Tensor:
    """Divide the document indices `number` [s, b] into chunks, and return [chunks, b, 1, 1, 1 + chunk]. The first
    column contains the document index of the last token before each chunk, or 0 for the first chunk."""
    filled = torch.cat((number, number[-1:].expand(-len(number) % chunk, -1))).unflatten(0, (-1, chunk))
    before = torch.cat((torch.zeros_like(number[None, :1]), filled[:-1, -1:]))
    return torch.cat((before, filled), dim=1).transpose(1, 2)[:, :, None, None]


def decays(g: Tensor, number: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute decays within chunks from the log decays g [..., chunk] and the document indices `number` [..., 1 +
    chunk]. Return three tensors for the tokens i of each chunk: the sums [..., i] of g up to token i, the decays [...,
    i, 1] from the start of the chunk to token i, and the decays [..., i, 1] from token i to the end of the chunk."""
    earlier = torch.ones(g.shape[-1:] * 2, dtype=g.dtype, device=g.device).triu()
    total = g @ earlier  # cumulative sum by a matrix product, because torch's cumsum is not deterministic on GPUs
    reach, left = total.exp(), (total[..., -1:] - total).exp()
    if number is not None:
        before, number = number[..., :1], number[..., 1:]
        reach, left = reach.masked_fill(number != before, 0.0), left.masked_fill(number != number[..., -1:], 0.0)
    return total, reach.unsqueeze(-1), left.unsqueeze(-1)


def decayed(products: Tensor, total: Tensor, number: Tensor | None) -> Tensor:
    """Multiply `products` [..., i, j] by exp(G_i - G_j), the decay from token j to token i. The result [..., i, j] is 0
    for j > i, and for tokens i and j of different documents. `total` [..., i] contains G, the first result of `decays`.
    `number` contains the document indices, as for `decays`."""
    out: Tensor = _Decayed.apply(products, total, number)
    return out


class DecayedContext(AutogradContext):
    shape: torch.Size


class _Decayed(torch.autograd.Function):
    """Autograd function of `decayed`. If R is the elementwise product of the result and its gradient, the gradient of
    G_i is the sum over j of R_ij - R_ji."""

    @staticmethod
    def forward(ctx: DecayedContext, products: Tensor, total: Tensor, number: Tensor | None) -> Tensor:
        decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).exp_().tril_()
        if number is not None:
            number = number[..., 1:]
            decay.masked_fill_(number.unsqueeze(-1) != number.unsqueeze(-2), 0.0)
        decayed = products * decay
        ctx.save_for_backward(decay, decayed)
        ctx.shape = products.shape
        return decayed

    @staticmethod
    @once_differentiable
    def backward(ctx: DecayedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        decay, decayed = ctx.saved_tensors
        of_total = None
        if ctx.needs_input_grad[1]:
            change = grad * decayed
            of_total = (change.sum(-1) - change.sum(-2)).sum_to_size(decay.shape[:-1])
        return (grad * decay).sum_to_size(ctx.shape), of_total, None


BLOCK = 16
"""Number of tokens per block into which `channel_products` divides a chunk."""


def channel_products(
    q: Tensor, k: Tensor, g: Tensor, number: Tensor | None, compiled: bool = False
) -> tuple[Tensor, ...]:
    """Compute the products of keys and queries with keys within each chunk, and the decays. This function is used if
    each channel has a separate decay.

    Chunks are divided into blocks of `BLOCK` tokens. The products between tokens of different blocks are computed by
    matrix products. For this purpose, the decay from token j to token i is written as the product of two factors: the
    decay from token j to the first token in the block of token i, and the decay from this first token to token i.
    Neither factor exceeds 1.

    Args:
        q: [..., chunk, dk], queries.
        k: [..., chunk, dk], keys.
        g: [..., chunk, dk], logarithms of decays.
        number: [..., 1 + chunk], document indices that `numbers_in_chunks` returns; None if there is only one document.
        compiled: Whether to compile the function that computes a block.

    Returns:
        Four tensors: the products [..., i, j] of keys with keys, the products [..., i, j] of queries with keys, the
            decays [..., i, dk] from the start of the chunk to token i, and the decays [..., i, dk] from token i to the
            end of the chunk. In the products, each channel is multiplied by its decay from token j to token i.
    """
    chunk, earlier = g.shape[-2], torch.ones(g.shape[-2:-1] * 2, dtype=g.dtype, device=g.device).tril()
    total = earlier @ g
    both = torch.stack((k, q))
    rows = []
    for start in range(0, chunk, BLOCK):
        within, before, behind = region(_of_block, compiled)(both, k, total, start)
        across = behind @ before.mT
        rows.append(F.pad(torch.cat((across, within), -1), (0, chunk - start - within.shape[-1])))
    products = torch.cat(rows, -2)
    reach = total.exp()
    left = (total[..., -1:, :] - total).exp()
    if number is not None:
        before, number = number[..., :1, None], number[..., 1:, None]
        products = products.masked_fill(number != number.mT, 0.0)
        reach, left = reach.masked_fill(number != before, 0.0), left.masked_fill(number != number[..., -1:, :], 0.0)
    return *products.unbind(), reach, left


def _of_block(both: Tensor, k: Tensor, total: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors for the block of `BLOCK` tokens that begins at `start`:

    - [2, ..., i, j], the products of the block's keys, and of the block's queries, with the block's keys.
    - [..., j, dk], the keys of all earlier tokens of the chunk, multiplied by the decay from each token to the first
      token of the block.
    - [2, ..., i, dk], the keys and queries of the block, multiplied by the decay from the first token of the block to
      each token.
    """
    own, first = slice(start, start + BLOCK), total[..., start : start + 1, :]
    pairs = total[..., own, None, :] - total[..., None, own, :]
    later = torch.ones(pairs.shape[-3:-1], dtype=torch.bool, device=pairs.device).triu(1)
    pairs = pairs.masked_fill(later[..., None], -torch.inf).exp() * k[..., None, own, :]
    within = (both[..., own, None, :] * pairs).sum(-1)
    before = k[..., :start, :] * (first - total[..., :start, :]).exp()
    return within, before, both[..., own, :] * (total[..., own, :] - first).exp()


class ScanContext(AutogradContext):
    hardware: Hardware


class _Scan(torch.autograd.Function):
    """Autograd function of the recurrence N_c = U_c - W_c S_c, S_{c+1} = r_c S_c + K_cᵀ N_c over chunks c. The function
    returns three tensors: the values N_c that all chunks write, the states S_c before each chunk, and the state after
    the last chunk."""

    # Arguments: `written` [chunks, n, chunk, dv] is U, `read` [chunks, n, chunk, dk] is W, `keys` [chunks, n, chunk,
    # dk] is K, `carried` [chunks, n, 1 or dk, 1] is r, and `state` [n, dk, dv] is the initial state S_0. Results:
    # values [chunks, n, chunk, dv], states before each chunk [chunks, n, dk, dv], and final state [n, dk, dv].
    @staticmethod
    def forward(
        ctx: ScanContext,
        hardware: Hardware,
        written: Tensor,
        read: Tensor,
        keys: Tensor,
        carried: Tensor,
        state: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        states = written.new_empty(len(read) + 1, *state.shape)
        states[0] = state
        new = torch.empty_like(written)
        for c in hardware.each(range(len(written))):
            torch.baddbmm(written[c], read[c], states[c], alpha=-1, out=new[c])
            behind = torch.mul(states[c], carried[c], out=states[c + 1])
            torch.baddbmm(behind, keys[c].mT, new[c], out=behind)
        states, final = states[:-1], states[-1].clone()
        ctx.hardware = hardware
        ctx.save_for_backward(read, keys, carried, new, states)
        return new, states, final

    @staticmethod
    @once_differentiable
    def backward(ctx: ScanContext, grad_new: Tensor, grad_states: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
        read, keys, carried, new, states = ctx.saved_tensors
        grad_written, grads = torch.empty_like(new), states.new_empty(len(new) + 1, *grad.shape)
        grads[-1] = grad
        for c in ctx.hardware.each(range(len(new) - 1, -1, -1)):
            torch.baddbmm(grad_new[c], keys[c], grads[c + 1], out=grad_written[c])
            before = torch.addcmul(grad_states[c], grads[c + 1], carried[c], out=grads[c])
            torch.baddbmm(before, read[c].mT, grad_written[c], alpha=-1, out=before)
        behind = grads[1:]
        grad_read = -(grad_written @ states.mT)
        grad_carried = (behind * states).sum_to_size(carried.shape)
        return None, grad_written, grad_read, new @ behind.mT, grad_carried, grads[0]


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Documents | None], Tensor]
"""Function that applies the gated delta rule to the arguments (q, k, v, g, beta, documents) and returns the outputs [s,
b, heads, dv]. The docstring of this module defines the shapes of the arguments."""


def flash_rule(dtype: torch.dtype, device: torch.device) -> Rule | None:
    """Return a function that computes the gated delta rule with the kernels of the flash-linear-attention package.
    Return None if the package is not installed, `device` is not a GPU, `dtype` is not a 16-bit dtype, or the run is
    deterministic."""
    if device.type != "cuda" or dtype.itemsize != 2 or torch.are_deterministic_algorithms_enabled():
        return None
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError:
        return None

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, documents: Documents | None) -> Tensor:
        length, samples, heads, _ = v.shape
        q, k = (x.repeat_interleave(heads // x.shape[2], dim=2) for x in (q, k))
        q, k, v, g, beta = (x.transpose(0, 1).contiguous() for x in (q, k, v, g, beta))
        if documents is None:
            return chunk_gated_delta_rule(q, k, v, g, beta)[0].transpose(0, 1)
        lengths = tuple(stop - start for starts in documents for start, stop in pairwise((*starts, length)))
        q, k, v, g, beta = (x.flatten(0, 1).unsqueeze(0) for x in (q, k, v, g, beta))
        out, _ = chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cumulative_lengths(lengths, q.device).long())
        return out.squeeze(0).unflatten(0, (samples, length)).transpose(0, 1)

    return rule
