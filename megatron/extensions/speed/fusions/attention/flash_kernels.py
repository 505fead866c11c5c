"""FlashAttention tile kernels for CPUs and GPUs (`megatron.core.attention.tile_kernels`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.attention.backends import AttentionOperands
from megatron.core.attention.tile_kernels import (
    Gradients,
    Kernel,
    Outputs,
    Rows,
    TorchKernel,
    hidden_pairs,
    key_rows,
    query_rows,
)
from megatron.core.attention.tiles import Tile, halved
from megatron.core.attention.varlen import Lengths, PackedKernel, Window, cumulative_lengths
from megatron.core.torch_private import (
    cpu_attention,
    cpu_attention_backward,
    flash_attention_backward,
    flash_attention_forward,
)


class Flash2:
    """FlashAttention-2 (arXiv 2307.08691), as included in torch."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, window: Window) -> tuple[Tensor, ...]:
        sizes = {"window_size_left": window[0], "window_size_right": window[1]}
        causal = window == (-1, 0)
        return flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, scale=self.scale, **sizes)[:4]

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, *state = kept
        if not state:  # random state for dropout, which is disabled here
            state = [torch.zeros(2, dtype=torch.uint64, device=grad.device), torch.empty(0, device=grad.device)]
        sizes = {"window_size_left": window[0], "window_size_right": window[1]}
        return flash_attention_backward(
            grad, *qkv, out, lse, *lengths, 0.0, window == (-1, 0), *state, scale=self.scale, **sizes
        )


def flash_kernel(of: AttentionOperands, on_gpus: Callable[[float], PackedKernel] = Flash2) -> Kernel:
    """Return the FlashAttention kernel that supports the device, dtype and head sizes. On GPUs, `on_gpus(scale)`
    creates the kernel. The results of all kernels agree up to rounding."""
    fits = of.device.type == "cuda" and fits_flash(of.dtype, of.head_dim, of.value_head_dim)
    if fits and torch.cuda.get_device_capability(of.device) >= (8, 0):
        return FlashCUDAKernel(on_gpus(of.scale))
    return FlashCPUKernel(of.scale) if of.device.type == "cpu" else TorchKernel(of.scale)


def fits_flash(dtype: torch.dtype, head_dim: int, value_head_dim: int) -> bool:
    """Return True if torch's FlashAttention on GPUs supports this dtype and these head widths."""
    widest = max(head_dim, value_head_dim)
    return dtype in (torch.float16, torch.bfloat16) and widest % 8 == 0 and widest <= 256


class FlashCPUKernel(TorchKernel):
    """torch's FlashAttention for CPUs, which supports fp64 but not dropout."""

    needs_places, most_queries = False, None
    longest_diagonal = 128
    """Maximum number of queries in a tile on the causal diagonal. Larger tiles are halved, because torch's kernel also
    computes masked query-key pairs, within blocks of up to 512 keys. For 512 tokens and 16 heads with 192 query
    channels and 128 value channels, halving the tiles reduces the time of the forward and backward pass by a
    quarter."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        return super().forward(q, k, v, halved(tuple(tiles), self.longest_diagonal))

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        return super().backward(rows, q, k, v, halved(tuple(tiles), self.longest_diagonal))

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Outputs:
        causal, mask = self._mask(tile, q)
        out, lse = cpu_attention(*map(by_head, of_one_width(q, k, v)), 0.0, causal, attn_mask=mask, scale=self.scale)
        return out.permute(2, 0, 1, 3)[..., : v.shape[-1]], lse.permute(2, 0, 1)

    def _backward(self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> Gradients:
        causal, mask = self._mask(tile, q)
        # the kernel stores the log-sum-exp in the memory layout [b, n, heads]
        lse = rows.lse.transpose(0, 1).contiguous().transpose(1, 2)
        operands = *map(by_head, of_one_width(rows.grad, q, k, v, rows.out)), lse
        grads = cpu_attention_backward(*operands, 0.0, causal, attn_mask=mask, scale=self.scale)
        dq, dk, dv = (grad.permute(2, 0, 1, 3)[..., : x.shape[-1]] for grad, x in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv

    @staticmethod
    def _mask(tile: Tile, q: Tensor) -> tuple[bool, Tensor | None]:
        """Return two values: whether the kernel applies the causal mask, and the mask [n, m] to add to the scores (None
        if no mask is needed)."""
        if tile.window is None:
            return tile.diagonal, None
        hidden = hidden_pairs(tile, q.device)
        assert hidden is not None
        return False, torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, float("-inf"))


def by_head(x: Tensor) -> Tensor:
    """Transpose [n, b, heads, d] -> [b, heads, n, d]."""
    return x.permute(1, 2, 0, 3)


class FlashCUDAKernel:
    """FlashAttention tile kernel for GPUs, in 16 bits. One launch computes all tiles with the same window."""

    needs_places, most_queries = False, None

    def __init__(self, flash: PackedKernel) -> None:
        self.packed = self.flash = EqualWidthsKernel(flash)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]) -> Iterator[tuple[Tile, Outputs]]:
        for window, group in _by_window(tiles).items():
            qkv = _pack(q, group, query_rows), _pack(k, group, key_rows), _pack(v, group, key_rows)
            out, lse, *_ = self.flash.forward(*qkv, self.lengths(group, q), window)
            outs, lses = _unpack(out, group, q, query_rows), _unpack(lse.t(), group, q, query_rows)
            yield from zip(group, zip(outs, lses, strict=True), strict=True)

    def backward(
        self, rows: Rows, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[Tile]
    ) -> Iterator[tuple[Tile, Gradients]]:
        for window, group in _by_window(tiles).items():
            grad, queries, out, lse = (_pack(x, group, query_rows) for x in (rows.grad, q, rows.out, rows.lse))
            qkv = queries, _pack(k, group, key_rows), _pack(v, group, key_rows)
            kept = out, lse.t().contiguous()
            dq, dk, dv = self.flash.backward(grad, qkv, kept, self.lengths(group, q), window)
            dqs = _unpack(dq, group, q, query_rows)
            dks, dvs = (_unpack(x, group, k, key_rows) for x in (dk, dv))
            yield from zip(group, zip(dqs, dks, dvs, strict=True), strict=True)

    def lengths(self, tiles: Sequence[Tile], q: Tensor) -> Lengths:
        """Return the `Lengths` of the packed sequences. The rows of each sample in each tile are one sequence."""
        of_queries, of_keys = [], []
        for tile in tiles:
            samples = q.shape[1] if tile.sample is None else 1
            of_queries += [len(tile.queries)] * samples
            of_keys += [len(tile.keys)] * samples
        starts, key_starts = (cumulative_lengths(tuple(lengths), q.device) for lengths in (of_queries, of_keys))
        return starts, key_starts, max(of_queries), max(of_keys)


class EqualWidthsKernel:
    """Adapter for a packed-sequence kernel that supports keys and values only if they have the same width. The adapter
    pads the narrower tensors with zero channels, which do not change scores or outputs. The padded tensors are freed
    after the kernel call."""

    def __init__(self, kernel: PackedKernel) -> None:
        self.kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths, window: Window) -> tuple[Tensor, ...]:
        wide_q, wide_k, wide_v = of_one_width(q, k, v)
        out, *rest = self.kernel.forward(wide_q, wide_k, wide_v, lengths, window)
        return out[..., : v.shape[-1]].contiguous(), *rest

    def backward(
        self, grad: Tensor, qkv: tuple[Tensor, ...], kept: tuple[Tensor, ...], lengths: Lengths, window: Window
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide_grad, out, *wide = of_one_width(grad.contiguous(), kept[0], *qkv)
        grads = self.kernel.backward(wide_grad, tuple(wide), (out, *kept[1:]), lengths, window)
        dq, dk, dv = (found[..., : x.shape[-1]] for found, x in zip(grads, qkv, strict=True))
        return dq, dk, dv


def of_one_width(*tensors: Tensor) -> list[Tensor]:
    """Pad tensors [..., d] with zeros to the largest width among them."""
    widest = max(x.shape[-1] for x in tensors)
    return [x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in tensors]


def window_of(tile: Tile) -> Window:
    """Convert a tile's window to the window argument of a FlashAttention kernel."""
    if tile.diagonal:
        return (-1 if tile.window is None else tile.window - 1, 0)
    if tile.window is None:
        return (-1, -1)
    return (len(tile.keys) - len(tile.queries) - tile.offset + tile.window - 1, -1)


def _by_window(tiles: Sequence[Tile]) -> dict[Window, list[Tile]]:
    groups: dict[Window, list[Tile]] = {}
    for tile in tiles:
        groups.setdefault(window_of(tile), []).append(tile)
    return groups


TileRows = Callable[[Tensor, Tile], Tensor]


def _pack(x: Tensor, tiles: Sequence[Tile], rows: TileRows) -> Tensor:
    """Concatenate the rows of all tiles, one sample after another: x [s, b, ...] -> [total, ...]."""
    return torch.cat([rows(x, tile).transpose(0, 1).flatten(0, 1) for tile in tiles])


def _unpack(packed: Tensor, tiles: Sequence[Tile], x: Tensor, rows: TileRows) -> Iterator[Tensor]:
    """Yield the rows of each tile as a tensor [n, b, ...]. `packed` [total, ...] is arranged like the result of `_pack`
    for x [s, b, ...]."""
    shapes = [rows(x, tile).shape[:2] for tile in tiles]
    for part, (n, b) in zip(packed.split([n * b for n, b in shapes]), shapes, strict=True):
        yield part.unflatten(0, (b, n)).transpose(0, 1)
