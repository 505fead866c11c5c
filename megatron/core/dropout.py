"""Dropout with masks that are identical for every layout.

A mask is a hash of (seed, site, sample, position in the sequence, feature). There is no generator state to save, to
synchronize between ranks, or to rewind for activation recomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.compiled_regions import region
from megatron.core.torch_private import AutogradContext

HASH_CHUNK = 2**22
"""Number of elements of a mask that are hashed at once. The temporary memory for this number of elements fits in the
cache of a GPU."""


def dropout(
    x: Tensor, p: float, key: int, sample_index: Tensor, seq_offset: int | Tensor = 0, compiled: bool = False
) -> Tensor:
    """Apply dropout to hidden states x [s, b, h] -> [s, b, h]; kept values are scaled by 1 / (1 - p).

    Args:
        x: Hidden states [s, b, h].
        p: Probability of dropping a value.
        key: Key of the dropout layer, from `site_key`.
        sample_index: Number of each sample in the order of the run, [b].
        seq_offset: Position of x[0] in the whole sequence, or the positions [s] of all rows. If several ranks hold
            parts of a sequence, each rank applies the corresponding part of the same mask.
        compiled: Whether to use a compiled kernel.
    """
    if p == 0.0:
        return x
    if compiled:
        return _CompiledDropout.apply(x, p, *mask_bits(x, key, sample_index, seq_offset))
    return _drop(x, p, *_rows_and_columns(x, key, sample_index, seq_offset))


def mask_bits(x: Tensor, key: int, sample_index: Tensor, seq_offset: int | Tensor = 0) -> tuple[Tensor, Tensor]:
    """Return int32 hashes of the rows [s * b] and columns [h] of x [s, b, h]. `drop_at_once` computes the mask of
    `dropout` from these hashes.

    The hash of an element of x is `_mix_` of the sum of its row hash and its column hash.
    """
    return _row_and_column_bits(*_rows_and_columns(x, key, sample_index, seq_offset))


def _rows_and_columns(x: Tensor, key: int, sample_index: Tensor, seq_offset: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return a hash of each row, [s, b], and of each column, [h], of x [s, b, h]."""
    sample = _absorb(key, sample_index)
    places = seq_offset if isinstance(seq_offset, Tensor) else _positions(seq_offset, x.shape[0], x)
    return _absorb(sample, places[:, None]), _positions(0, x.shape[2], x)


def attention_dropout(
    probs: Tensor,
    p: float,
    key: int,
    sample_index: Tensor,
    head_offset: int = 0,
    query_offset: int = 0,
    key_offset: int = 0,
) -> Tensor:
    """Apply dropout to attention probabilities [b, heads, q, k]; kept values are scaled by 1 / (1 - p).

    If `probs` is only a block of the attention matrix, the offsets are the head, query and key indices of its first
    element probs[:, 0, 0, 0].
    """
    if p == 0.0:
        return probs
    _, heads, queries, keys = probs.shape
    head = _absorb(_absorb(key, sample_index)[:, None], _positions(head_offset, heads, probs))  # head: [b, heads]
    rows = _absorb(head[..., None], _positions(query_offset, queries, probs))  # rows: [b, heads, q]
    return _drop(probs, p, rows, _positions(key_offset, keys, probs))


def random_bits(key: int, sample_index: Tensor, places: Tensor, columns: int) -> Tensor:
    """Return random int32 numbers [s, b, columns], uniform over all int32 values. The numbers of a row depend on its
    token position in `places` [s] and on its sample in `sample_index` [b]."""
    rows = _absorb(_absorb(key, sample_index), places[:, None])  # [s, b]
    row_bits, column_bits = _row_and_column_bits(rows, _positions(0, columns, rows))
    return _mix_(row_bits[:, None] + column_bits).view(*rows.shape, columns)


def _drop(x: Tensor, p: float, rows: Tensor, columns: Tensor) -> Tensor:
    assert 0.0 < p < 1.0, f"dropout probability {p}"
    return x.masked_fill(_dropped(p, rows, columns).view(x.shape), 0.0).mul(1.0 / (1.0 - p))


class DropoutContext(AutogradContext):
    p: float


class _CompiledDropout(torch.autograd.Function):
    """Autograd Function that applies `drop_at_once`. To save memory, the mask is not stored but recomputed in the
    backward pass from the saved hashes of rows and columns."""

    @staticmethod
    def forward(ctx: DropoutContext, x: Tensor, p: float, row_bits: Tensor, column_bits: Tensor) -> Tensor:
        ctx.save_for_backward(row_bits, column_bits)
        ctx.p = p
        return region(drop_at_once, True)(x, p, row_bits, column_bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: DropoutContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        return region(drop_at_once, True)(grad, ctx.p, *ctx.saved_tensors), None, None, None


def drop_at_once(x: Tensor, p: float, row_bits: Tensor, column_bits: Tensor) -> Tensor:
    """Compute the same result as `_drop` with code for torch.compile. In the compiled kernel, the hash of an element
    stays in registers."""
    mixed = _mix_(row_bits[:, None] + column_bits)
    return x.masked_fill((mixed < threshold(p)).view(x.shape), 0.0).mul(1.0 / (1.0 - p))


def _dropped(p: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the dropout mask: bool [rows, columns], True with probability p.

    Each element is dropped if a 32-bit hash of its (row, column) is below a threshold. The hash of a pair (row, column)
    is computed from a 64-bit hash of the row and a 64-bit hash of the column.
    """
    row_bits, column_bits = _row_and_column_bits(rows, columns)
    dropped = torch.empty(row_bits.numel(), column_bits.numel(), dtype=torch.bool, device=rows.device)
    step = max(1, HASH_CHUNK // max(1, column_bits.numel()))
    for out, part in zip(dropped.split(step), row_bits.split(step), strict=True):
        torch.lt(_mix_(part[:, None] + column_bits), threshold(p), out=out)
    return dropped


def threshold(p: float) -> int:
    """Return the int32 threshold below which a fraction p of all int32 numbers lies."""
    return min(round(p * 2**32) - 2**31, 2**31 - 1)


def bits_of_columns(places: Tensor) -> Tensor:
    """Return an int32 hash of each column. `places` contains the int64 indices of the columns, which are features or
    key positions."""
    return _low_bits(_absorb(0, places))


def _row_and_column_bits(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return an int32 hash of each row and of each column. The hash of the element at (row, column) is `_mix_` of the
    sum of the row hash and the column hash."""
    return _low_bits(rows.flatten()), bits_of_columns(columns)


def _mix_(x: Tensor) -> Tensor:
    """Hash int32 numbers to int32 numbers in place. This is the mixing function of MurmurHash3, with the constants of
    "lowbias32".

    The last xor-shift of the mixer is omitted, because it would change only the lower 16 bits. The comparison with the
    dropout threshold depends almost only on the upper bits.
    """
    x.bitwise_xor_(_shift_right(x, 16, 32)).mul_(0x7FEB352D)
    return x.bitwise_xor_(_shift_right(x, 15, 32)).mul_(_signed(0x846CA68B, 32))


def _positions(start: int, length: int, like: Tensor) -> Tensor:
    return torch.arange(start, start + length, dtype=torch.int64, device=like.device)


def _absorb(state: Tensor | int, value: Tensor) -> Tensor:
    """Return the next hash of a chain: mix the 64 bits of `state` and the integer `value` with splitmix64."""
    x = value * _signed(0x9E3779B97F4A7C15, 64) + state
    x = (x ^ _shift_right(x, 30, 64)) * _signed(0xBF58476D1CE4E5B9, 64)
    x = (x ^ _shift_right(x, 27, 64)) * _signed(0x94D049BB133111EB, 64)
    return x ^ _shift_right(x, 31, 64)


def _low_bits(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64 numbers, as int32."""
    return ((x & 0xFFFFFFFF) - 2**31).to(torch.int32)


def _shift_right(x: Tensor, by: int, bits: int) -> Tensor:
    """Shift right without copying the sign (logical shift). torch's operator is an arithmetic shift."""
    return (x >> by).bitwise_and_((1 << (bits - by)) - 1)


def _signed(constant: int, bits: int) -> int:
    """Reinterpret an unsigned constant as a signed integer with the same bits. In a product that overflows, both
    integers give the same bits."""
    return constant - (1 << bits) if constant >= 1 << (bits - 1) else constant


def round_to_bf16(x: Tensor, uniform: Tensor) -> Tensor:
    """Round fp32 to bf16 stochastically, so that the expected value of the result is the exact fp32 value."""
    bits = x.view(torch.int32) + (uniform * 65536.0).to(torch.int32)
    return ((bits >> 16) << 16).view(torch.float32).to(torch.bfloat16)


def mixed(bits: Tensor) -> Tensor:
    """Hash int32 numbers: each input bit changes each output bit in half of all cases."""
    bits = (bits ^ ((bits >> 16) & 0xFFFF)) * 0x7FEB352D
    bits = (bits ^ ((bits >> 15) & 0x1FFFF)) * -2073254261
    return bits ^ ((bits >> 16) & 0xFFFF)


def uniform_of(key: Tensor, salt: int) -> Tensor:
    """Hash each 32-bit key to a number in [0, 1). Different salts give different numbers."""
    bits = mixed(key ^ salt)
    return ((bits >> 8) & 0xFFFFFF).float() * 2.0**-24
