"""How our parameters are made of Hugging Face's tensors, and the other way round, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, cat, stack

from megatron.core.config.model import TransformerConfig
from megatron.core.transformer.parameters import XIELU_BETA, group_rows
from megatron.extensions.hugging_face.safetensors_file import Sliceable

Box = tuple[slice, ...]
"""One slice with a start and a stop for each dim."""


class Layout:
    """How one of our parameters is made of their tensors, and the other way round, bit for bit."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """Converts their tensors to our parameter. Raises ValueError or RuntimeError if their shapes do not fit."""
        raise NotImplementedError

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        """Converts our parameter to their tensors."""
        raise NotImplementedError

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        """A box of `ours`. Their tensors may be on disk; overridden where less than all of them needs to be read."""
        return self.ours(config, [tensor[()] for tensor in tensors])[box]


class Same(Layout):
    """One tensor, the same on both sides."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter,)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return tensors[0][box]


class Transposed(Layout):
    """Transposed: GPT-2 stores [in, out], we store [out, in]. A bias is the same on both sides."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t().contiguous()

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter.t().contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return tensors[0][box[::-1]].t().contiguous()


class VocabularyRows(Layout):
    """Rows of the vocabulary: ours are padded with zeros to the padded vocabulary."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        if len(tensors[0]) != config.vocab_size:
            raise ValueError(f"{len(tensors[0])} rows do not fit a vocabulary of {config.vocab_size} tokens")
        return self.part(config, tensors, (slice(0, config.padded_vocab_size),))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter[: config.vocab_size].contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        first, last = (min(end, config.vocab_size or 0) for end in (box[0].start, box[0].stop))
        rows = tensors[0][(slice(first, last), *box[1:])]
        padding = box[0].stop - box[0].start - len(rows)
        return cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows


class Stacked(Layout):
    """Several tensors of one shape, stacked along a new first dim, such as gate and up of a gated MLP."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return stack(list(tensors))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in parameter.unbind())

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return stack([tensor[box[1:]] for tensor in tensors[box[0]]])


class StackedHalves(Layout):
    """Gate and up of all experts as [E, 2, ffn, h]; they store all gates and all ups, [E, ffn, h] each."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return stack(list(tensors), dim=1)

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in parameter.unbind(1))

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts, halves, *rest = box
        return stack([tensor[(experts, *rest)] for tensor in tensors[halves]], dim=1)


class StackedExperts(Layout):
    """Gate and up of all experts as [E, 2, ffn, h]; they store them expert by expert."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return stack(list(tensors)).unflatten(0, (-1, 2))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return tuple(part.contiguous() for part in parameter.flatten(0, 1).unbind())

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts = [tensors[2 * expert : 2 * expert + 2][box[1]] for expert in range(box[0].start, box[0].stop)]
        return stack([stack([tensor[box[2:]] for tensor in halves]) for halves in experts])


class GateUpColumns(Layout):
    """Gate and up of all experts as [E, 2, ffn, h], biases [E, 2, ffn]. They store [E, h, 2 * ffn] and [E, 2 * ffn],
    all gates before all ups (Llama 4)."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return _rows_of_columns(self.halves(tensors[0]))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (self.joined(_rows_of_columns(parameter)).contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts, halves, ffn, *rest = box
        return _rows_of_columns(self.columns(tensors[0], (experts, *rest), ffn))[:, halves]

    def halves(self, theirs: Tensor) -> Tensor:
        """[E, ..., 2 * ffn] -> [E, 2, ..., ffn]"""
        return theirs.unflatten(-1, (2, -1)).movedim(-2, 1)

    def joined(self, halves: Tensor) -> Tensor:
        """[E, 2, ..., ffn] -> [E, ..., 2 * ffn]"""
        return halves.movedim(1, -2).flatten(-2)

    def columns(self, tensor: Sliceable, rows: Box, ffn: slice) -> Tensor:
        """`halves` of some rows, and of those columns of each half."""
        size = tensor.shape[-1] // 2
        cut = [slice(half * size + ffn.start, half * size + ffn.stop) for half in range(2)]
        return stack([tensor[(*rows, each)] for each in cut], dim=1)


class InterleavedGateUpColumns(GateUpColumns):
    """The same where each gate is followed by its up (gpt-oss)."""

    def halves(self, theirs: Tensor) -> Tensor:
        return theirs.unflatten(-1, (-1, 2)).movedim(-1, 1)

    def joined(self, halves: Tensor) -> Tensor:
        return halves.movedim(1, -1).flatten(-2)

    def columns(self, tensor: Sliceable, rows: Box, ffn: slice) -> Tensor:
        return self.halves(tensor[(*rows, slice(2 * ffn.start, 2 * ffn.stop))])


def _rows_of_columns(x: Tensor) -> Tensor:
    """[E, 2, in, out] <-> [E, 2, out, in]; biases [E, 2, out] stay."""
    return x.transpose(2, 3).contiguous() if x.ndim == 4 else x.contiguous()


class TransposedExperts(Layout):
    """Theirs: [E, in, out]. Ours: [E, out, in]."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(1, 2).contiguous()

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter.transpose(1, 2).contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts, out, within = box
        return tensors[0][(experts, within, out)].transpose(1, 2).contiguous()


class QueryGroups(Layout):
    """Theirs: q [heads * d, ...], k and v [groups * d, ...]. Ours: [groups, q_per_group + 2, d, ...]."""

    def counts(self, config: TransformerConfig) -> tuple[int, ...]:
        """Heads of a query group in each of their tensors."""
        return config.queries_per_group, 1, 1

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return self.join(tensors, config.query_groups, config.head_dim)

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        parts = parameter.split(self.counts(config), dim=1)
        return tuple(part.flatten(0, 2).contiguous() for part in parts)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, heads, channels, *rest = box
        rows = [n * config.head_dim for n in self.counts(config)]
        cut = [slice(groups.start * row, groups.stop * row) for row in rows]
        parts = [tensor[(rows, *rest)] for tensor, rows in zip(tensors, cut, strict=True)]
        return self.join(parts, groups.stop - groups.start, config.head_dim)[:, heads, channels]

    def join(self, tensors: Sequence[Tensor], groups: int, head_dim: int) -> Tensor:
        return cat([x.unflatten(0, (groups, -1, head_dim)) for x in tensors], dim=1)


class GatedQueryGroups(QueryGroups):
    """Theirs: q and gates of the output [heads * d, ...], k and v [groups * d, ...]; ours has them side by side."""

    def counts(self, config: TransformerConfig) -> tuple[int, ...]:
        return config.queries_per_group, config.queries_per_group, 1, 1


class QueryGatePairs(QueryGroups):
    """As `GatedQueryGroups`, with theirs [heads * 2 * d, ...], each head's query before the gate of its output, and k
    and v."""

    def counts(self, config: TransformerConfig) -> tuple[int, ...]:
        return 2 * config.queries_per_group, 1, 1

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        pairs, k, v = parameter.split(self.counts(config), dim=1)
        pairs = pairs.unflatten(1, (2, -1)).transpose(1, 2).flatten(0, 3)
        return pairs.contiguous(), *(x.flatten(0, 2).contiguous() for x in (k, v))

    def join(self, tensors: Sequence[Tensor], groups: int, head_dim: int) -> Tensor:
        pairs, *rest = tensors
        q, gates = pairs.unflatten(0, (-1, 2, head_dim)).transpose(0, 1).flatten(1, 2)
        return super().join((q, gates, *rest), groups, head_dim)


class RowsOfGroups(Layout):
    """Theirs: several tensors [groups * n, ...]: those of queries, gates if there are any, keys and values whose heads
    differ in width. Ours: [groups, sum of n, ...], side by side in each group."""

    def groups(self, config: TransformerConfig) -> int:
        """Number of groups."""
        return config.query_groups

    def rows(self, config: TransformerConfig) -> tuple[int, ...]:
        """Rows of a group in each of their tensors."""
        return tuple(rows for rows in group_rows(config) if rows)

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return cat([x.unflatten(0, (self.groups(config), -1)) for x in tensors], dim=1)

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        parts = parameter.split(self.rows(config), dim=1)
        return tuple(part.flatten(0, 1).contiguous() for part in parts)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, channels, *rest = box
        cut = [slice(groups.start * rows, groups.stop * rows) for rows in self.rows(config)]
        parts = [tensor[(rows, *rest)] for tensor, rows in zip(tensors, cut, strict=True)]
        return cat([x.unflatten(0, (groups.stop - groups.start, -1)) for x in parts], dim=1)[:, channels]


def delta_nets(config: TransformerConfig) -> Any:
    """The shape of gated delta nets: options of whichever extension states their heads."""
    return next(options for options in config.extension_options if hasattr(options, "linear_num_key_heads"))


class KeyHeads(RowsOfGroups):
    """The same for the two projections of a gated delta net, by key heads (Qwen3-Next)."""

    def groups(self, config: TransformerConfig) -> int:
        return delta_nets(config).linear_num_key_heads

    def rows(self, config: TransformerConfig) -> tuple[int, ...]:
        *projected, beta, decay = delta_nets(config).linear_channels
        return sum(projected), beta + decay


class ConvolvedHeads(Layout):
    """Theirs: [channels, 1, taps], those of all queries, keys and values. Ours: [key heads, channels of each, taps]."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        heads, widths = delta_nets(config).linear_num_key_heads, delta_nets(config).linear_channels[:3]
        parts = tensors[0].squeeze(1).split([heads * width for width in widths])
        return cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1)

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        parts = parameter.split(delta_nets(config).linear_channels[:3], dim=1)
        return (cat([part.flatten(0, 1) for part in parts]).unsqueeze(1),)


class JoinedQueryGroups(QueryGroups):
    """Ling: the rows of all queries, then those of all keys, then those of all values in one tensor."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        rows = [count * config.query_groups * config.head_dim for count in self.counts(config)]
        return super().ours(config, tensors[0].split(rows))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (cat(super().theirs(config, parameter)),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, heads, channels, *rest = box
        widths = [count * config.head_dim for count in self.counts(config)]
        first = [sum(widths[:at]) * config.query_groups for at in range(len(widths))]
        cut = [
            slice(start + groups.start * width, start + groups.stop * width)
            for start, width in zip(first, widths, strict=True)
        ]
        parts = [tensors[0][(rows, *rest)] for rows in cut]
        return self.join(parts, groups.stop - groups.start, config.head_dim)[:, heads, channels]


class Heads(Layout):
    """Theirs: [heads * d, ...]. Ours: [heads, d, ...]."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(0, (config.num_attention_heads, -1))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter.flatten(0, 1),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        heads, channels, *rest = box
        width = tensors[0].shape[0] // config.num_attention_heads
        rows = tensors[0][(slice(heads.start * width, heads.stop * width), *rest)]
        return rows.unflatten(0, (-1, width))[:, channels]


class JointHeads(Layout):
    """GPT-2: all queries, keys and values in one tensor, concatenated along the last dim. A bias has no other dim."""

    groups = QueryGroups()

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return self.groups.ours(config, tensors[0].t().chunk(3))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (cat(self.groups.theirs(config, parameter)).t().contiguous(),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, heads, channels, *rest = box
        width = config.query_projection_size
        first, last = groups.start * config.head_dim, groups.stop * config.head_dim
        columns = [slice(at * width + first, at * width + last) for at in range(3)]
        parts = [tensors[0][(*rest, each)].t() for each in columns]
        return self.groups.join(parts, groups.stop - groups.start, config.head_dim)[:, heads, channels]


class GroupByGroup(Layout):
    """BLOOM, GPT-NeoX: [heads * 3 * d, ...], head by head its query, key and value: our order, three dims as one."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(0, (config.query_groups, -1, config.head_dim))

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter.flatten(0, 2),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        groups, heads, channels, *rest = box
        width = (config.queries_per_group + 2) * config.head_dim
        rows = tensors[0][(slice(groups.start * width, groups.stop * width), *rest)]
        return rows.unflatten(0, (groups.stop - groups.start, -1, config.head_dim))[:, heads, channels]


class WithConstantsOfXIELU(Layout):
    """xIELU's second scalar, beside which they store its slope at zero and a bound of its exponent."""

    constants = XIELU_BETA, -1e-6

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        for tensor, value in zip(tensors[1:], self.constants, strict=True):
            if not tensor.is_meta and not torch.isclose(tensor.double(), torch.tensor(value).double(), rtol=0.01):
                raise ValueError(f"xIELU with {tensor.item()} is not supported; it must be {value}")
        return tensors[0]

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return parameter, *(parameter.new_tensor(value) for value in self.constants)


LAYOUTS: dict[str, Layout] = {
    kind.__name__: kind()
    for kind in (
        *(Same, Transposed, VocabularyRows, Stacked, StackedExperts),
        *(GateUpColumns, InterleavedGateUpColumns, TransposedExperts),
        *(QueryGroups, GatedQueryGroups, JoinedQueryGroups, QueryGatePairs, Heads, JointHeads, GroupByGroup),
        *(RowsOfGroups, StackedHalves, KeyHeads, ConvolvedHeads, WithConstantsOfXIELU),
    )
}
