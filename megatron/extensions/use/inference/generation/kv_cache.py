"""Key/value cache for generation, and attention to the cached tokens. The cache contains several sequences, which may
have different lengths.

Each row of the cache stores one sequence, whose first token is in column 0. The new tokens of a forward pass are padded
on the right to equal length. No query attends to the padding. A later pass overwrites the padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.batch import CachedCore
from megatron.core.config.layers import Span

GROWTH = 64
"""The number of columns in the cache is always a multiple of `GROWTH`. If the cache needs more columns, the number of
columns is increased by at least 50%."""


class KeyValueCache:
    """Cache of a model's intermediate results for the tokens of several sequences. For each attention layer, the cache
    contains keys and values, or the latents from which keys and values are projected. For each linear attention layer,
    the cache contains recurrent states. Memory use grows with the number of sequences and with their lengths."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        """Number of cached tokens in each row."""
        self._layers: dict[int, tuple[Tensor, ...]] = {}
        """Cached tensors of each layer, [rows, groups, columns, width]."""
        self._states: dict[int, tuple[Tensor, ...]] = {}
        """Recurrent states of each layer, [rows, ...]."""

    def extend(
        self, counts: Sequence[int], device: torch.device, first: int | None = None, multiple: int = 1
    ) -> Cached:
        """Begin a forward pass over new tokens. Row `first` + i of the cache receives `counts[i]` new tokens. If
        `first` is None, the first row is 0. If the pass needs more rows than the cache contains, the cache grows. The
        tokens are padded to the largest count, rounded up to a multiple of `multiple`."""
        first = 0 if first is None else first
        assert first <= len(self.lengths), f"row {first} of {len(self.lengths)}"
        self.lengths += [0] * (first + len(counts) - len(self.lengths))
        past = tuple(self.lengths[first : first + len(counts)])
        for row, count in enumerate(counts, first):
            self.lengths[row] += count
        width = -(-max(counts) // multiple) * multiple
        return Cached(self, first, past, tuple(counts), width, device)

    def drop(self, row: int) -> None:
        """Remove the sequence in row `row` of the cache. The last row of the cache is moved to `row`."""
        last = len(self.lengths) - 1
        for tensors in (*self._layers.values(), *self._states.values()):
            for kept in tensors:
                if row < last:
                    kept[row] = kept[last]
                # Old values in the cache must be finite. A mask does not remove NaN, because 0 * NaN is NaN.
                kept[last] = 0
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()

    def columns_of(self, layer: int, new: Sequence[Tensor], rows: int, columns: int) -> tuple[Tensor, ...]:
        """Return the cache tensors of a layer, [rows, groups, columns, width]. The cache tensors are enlarged if they
        have fewer than `rows` rows or `columns` columns. `new` contains the new keys and values of the layer, which
        determine the sizes of the other dims."""
        old = self._layers.get(layer)
        have = (0, 0) if old is None else (old[0].shape[0], old[0].shape[2])
        if old is None or have[0] < rows or have[1] < columns:
            if columns > have[1]:
                columns = -(-max(columns, have[1] * 3 // 2) // GROWTH) * GROWTH
            shape = max(rows, have[0]), max(columns, have[1])
            grown = tuple(x.new_zeros(shape[0], x.shape[2], shape[1], x.shape[3]) for x in new)
            for kept, x in zip(old or (), grown, strict=False):
                x[: have[0], :, : have[1]] = kept
            self._layers[layer] = grown
        return self._layers[layer]

    def states_of(self, layer: int, first: int, count: int) -> tuple[Tensor, ...] | None:
        """Return the states [count, ...] of `count` rows, beginning with row `first`. Return None before the first
        forward pass of the layer."""
        states = self._states.get(layer)
        return None if states is None else tuple(x[first : first + count] for x in states)

    def set_states(self, layer: int, first: int, new: Sequence[Tensor]) -> None:
        """Replace the states [count, ...] of `count` rows, beginning with row `first`."""
        rows = first + len(new[0])
        states = self._states.get(layer)
        if states is None or len(states[0]) < rows:
            grown = tuple(x.new_zeros(rows, *x.shape[1:]) for x in new)
            for kept, x in zip(states or (), grown, strict=False):
                x[: len(kept)] = kept
            states = self._states[layer] = grown
        for kept, x in zip(states, new, strict=True):
            kept[first:rows] = x


class Cached:
    """Part of a cache that one forward pass reads and extends, for b sequences with up to s new tokens each. This class
    implements the protocol `megatron.core.batch.EarlierTokens`."""

    def __init__(
        self,
        cache: KeyValueCache,
        first: int,
        past: tuple[int, ...],
        counts: tuple[int, ...],
        width: int,
        device: torch.device,
    ) -> None:
        self.cache = cache
        self.first = first
        self.counts = counts
        self.width = width
        self.rows, self.columns = len(counts), max(past) + width
        self.fresh = not any(past)
        """True if no row has earlier tokens. Attention is then the same as without a cache."""
        self._past = torch.tensor(past, device=device)
        self.positions = self._past[:, None] + torch.arange(width, device=device)
        """Positions of the new tokens, [b, s]."""
        self.lengths = None if min(counts) == width else torch.tensor(counts, device=device)
        """Number of new tokens of each sequence, [b]. None if all sequences have the same number of new tokens, because
        no padding is needed in this case."""
        self._seen: dict[Span, Tensor] = {}

    def append(self, layer: int, *new: Tensor) -> tuple[Tensor, ...] | None:
        """Store keys and values [s, b, groups, width] of the new tokens. Return the keys and values of all tokens [b,
        groups, columns, width]. Return None if there are no earlier tokens."""
        stop = self.first + self.rows
        kept = self.cache.columns_of(layer, new, stop, self.columns)
        rows = torch.arange(self.first, stop, device=self.positions.device)[:, None]
        for tensor, x in zip(kept, new, strict=True):
            if self.fresh:
                tensor[self.first : stop, :, : self.width] = x.permute(1, 2, 0, 3)
            else:
                tensor[rows, :, self.positions] = x.transpose(0, 1)
        return None if self.fresh else tuple(x[self.first : stop, :, : self.columns] for x in kept)

    def states(self, layer: int) -> tuple[Tensor, ...] | None:
        """Return the recurrent states that a layer has after processing the earlier tokens, as tensors [b, ...]. Return
        None if there are no earlier tokens."""
        return None if self.fresh else self.cache.states_of(layer, self.first, self.rows)

    def set_states(self, layer: int, *new: Tensor) -> None:
        """Store the recurrent states that a layer has after processing the new tokens. The layer's previous states are
        overwritten."""
        self.cache.set_states(layer, self.first, new)

    def distances(self) -> Tensor:
        """Return the position of each key minus the position of each query, [b, s, columns]."""
        return torch.arange(self.columns, device=self.positions.device) - self.positions[:, :, None]

    def seen(self, span: Span) -> Tensor:
        """Return the boolean attention mask [b, 1, 1, s, columns]. True means that the query attends to the key. `span`
        contains the sliding window or the attention chunk of the layer."""
        if span not in self._seen:
            distances = self.distances()
            seen = distances <= 0
            if span.window is not None:
                seen &= distances > -span.window
            if span.chunk is not None:
                keys = torch.arange(self.columns, device=seen.device)
                seen &= keys // span.chunk == (self.positions // span.chunk)[:, :, None]
            self._seen[span] = seen[:, None, None]
        return self._seen[span]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, core: CachedCore) -> Tensor:
        """Compute attention of the queries `q` to the keys `k` with the values `v`. q: [s, b, heads, d]. k: [b, groups,
        columns, d]. v: [b, groups, columns, dv]. Returns [s, b, heads, dv].

        Attention scores are computed in fp32, or in fp64 if the operands are fp64. Logit soft-capping, ALiBi slopes
        [heads] and attention sinks [heads] are applied as in `TorchKernel` and `add_sinks_`.
        """
        s, b, heads, _ = q.shape
        groups = k.shape[1]
        cap = core.cap
        slopes = core.slopes
        sinks = core.softmax_offset
        rows = (q * core.scale).permute(1, 2, 0, 3).reshape(b, groups, heads // groups * s, -1)
        scores = (rows @ k.mT).unflatten(2, (-1, s))  # scores [b, groups, heads / groups, s, columns]
        scores = scores.to(torch.promote_types(q.dtype, torch.float32))
        if cap is not None:
            scores = scores.div_(cap).tanh_().mul_(cap)
        if slopes is not None:
            distances = self.distances()[:, None, None].to(scores.dtype)
            scores = scores + slopes.to(scores.dtype).view(groups, -1, 1, 1) * distances
        scores = scores.masked_fill(~self.seen(core.span), -torch.inf)
        if sinks is not None:
            column = sinks.to(scores.dtype).view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
            weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        out = weights.to(v.dtype).flatten(2, 3) @ v
        return out.unflatten(2, (-1, s)).flatten(1, 2).permute(2, 0, 1, 3)
