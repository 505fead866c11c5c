"""How our parameters are made of Hugging Face's tensors, and the other way round, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor, cat, stack

from megatron.core.config.model import TransformerConfig
from megatron.core.transformer.heads import group_rows
from megatron.extensions.interop.hugging_face.safetensors_file import Sliceable

Box = tuple[slice, ...]
"""One slice with a start and a stop for each dim."""


class Layout:
    """How one of our parameters is made of their tensors, and the other way round, bit for bit."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """Converts their tensors to our parameter. Their shapes are those that `theirs` gives."""
        raise NotImplementedError

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        """Converts our parameter to their tensors. It may be on the meta device."""
        raise NotImplementedError

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        """A box of `ours`. Their tensors may be on disk; overridden where less than all of them needs to be read."""
        return self.ours(config, [tensor[()] for tensor in tensors])[box]


@dataclass(frozen=True)
class Pieces(Layout):
    """Ours consists of pieces: their tensors, or sections of a single one, with their dims in another order."""

    pattern: str | tuple[str, ...] = "... -> ..."
    """Dims of theirs and of the piece, as "(g n d) ... -> g n d ...": axes in brackets are one dim, row-major, "1" is a
    dim of size 1, and "..." are any others. Of a tuple each is the pattern of one piece."""

    sizes: Callable[[TransformerConfig], Mapping[str, int]] = lambda config: {}
    """Sizes of axes. One axis of a dim may be left out, whose size follows from the others'."""

    joined: int | None = None
    """The dim of ours along which pieces are concatenated; None for a single piece."""

    counts: Callable[[TransformerConfig], Sequence[int]] | None = None
    """Sizes of the pieces along it; None for 1 each."""

    section: int | None = None
    """The dim of their single tensor along which pieces lie one behind the other, each in proportion to its count."""

    sections: int | None = None
    """Pieces that lie so in the first of several tensors, where each of the others is a piece."""

    may_be_thirds: bool = False
    """Files may also have equal parts of all rows in the tensors, as transformers saves what its class has in one."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        pieces: Sequence[Tensor] = (parameter,)
        if self.joined is not None:
            pieces = parameter.split(self._counts(config, parameter.shape[self.joined]), dim=self.joined)
        sizes = self.sizes(config)
        sides = [self._sides(at) for at in range(len(pieces))]
        found = [rearranged(each, ours, theirs, sizes) for each, (theirs, ours) in zip(pieces, sides, strict=True)]
        if self.section is not None:
            first = self.sections or len(found)
            found = [cat(found[:first], dim=self.section), *found[first:]]
        return tuple(each.contiguous() for each in found)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        if self.joined is None:
            return self._piece(config, 0, tensors[0], box)
        found = []
        start = 0
        counts = self._counts(config, len(tensors))
        wanted, first = box[self.joined], 0 if self.section is None else self.sections or len(counts)
        for at, count in enumerate(counts):
            inside = slice(max(wanted.start - start, 0), min(wanted.stop - start, count))
            if inside.start < inside.stop:
                if at < first:
                    tensor: Sliceable = _Section(tensors[0], self.section or 0, start, counts[:first], at)
                else:
                    tensor = tensors[at - max(first - 1, 0)]
                of_piece = (*box[: self.joined], inside, *box[self.joined + 1 :])
                found.append(self._piece(config, at, tensor, of_piece))
            start += count
        return cat(found, dim=self.joined)

    def _piece(self, config: TransformerConfig, at: int, tensor: Sliceable, box: Box) -> Tensor:
        """A box of a piece. Of theirs it reads, in each dim, the range that the box has of the outermost axis."""
        theirs, ours = self._sides(at)
        further = len(tensor.shape) - len(_dims(theirs, 0))
        sizes, axes = self.sizes(config), _dims(ours, further)
        cut = {names[0]: each for names, each in zip(axes, box, strict=True) if len(names) == 1}
        slices, read = [], dict[str, int]()
        for size, names in zip(tensor.shape, _dims(theirs, further), strict=True):
            found, first = _axis_sizes(size, names, sizes), next(iter(names), None)
            if first in cut:
                each, inner = cut[first], size // found[first]
                slices.append(slice(each.start * inner, each.stop * inner))
                read[first] = each.stop - each.start
            else:
                slices.append(slice(0, size))
        piece = rearranged(tensor[tuple(slices)], theirs, ours, {**sizes, **read})
        kept = [slice(None) if names[:1] and names[0] in read else each for names, each in zip(axes, box, strict=True)]
        return piece[tuple(kept)]

    def _sides(self, at: int) -> tuple[str, str]:
        pattern = self.pattern if isinstance(self.pattern, str) else self.pattern[at]
        theirs, _, ours = pattern.partition(" -> ")
        return theirs, ours

    def _counts(self, config: TransformerConfig, number: int) -> list[int]:
        return [1] * number if self.counts is None else list(self.counts(config))


class _Section:
    """The section number `at` of a tensor's dim, whose length is divided in proportion to `counts`."""

    def __init__(self, tensor: Sliceable, dim: int, start: int, counts: Sequence[int], at: int) -> None:
        self.tensor = tensor
        self.dim = dim % len(tensor.shape)
        self.shape = list(tensor.shape)
        unit = self.shape[self.dim] // sum(counts)
        self.start, self.shape[self.dim] = start * unit, counts[at] * unit

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def __getitem__(self, box: Box) -> Tensor:
        slices, each = list(box), box[self.dim]
        slices[self.dim] = slice(self.start + each.start, self.start + each.stop)
        return self.tensor[tuple(slices)]


def rearranged(x: Tensor, source: str, target: str, sizes: Mapping[str, int]) -> Tensor:
    """A tensor whose dims are those of one side of a pattern, with the dims of the other."""
    further = x.ndim - len(_dims(source, 0))
    before, after = _dims(source, further), _dims(target, further)
    found: dict[str, int] = {}
    for size, names in zip(x.shape, before, strict=True):
        found |= _axis_sizes(size, names, sizes)
    axes = [axis for names in before for axis in names]
    x = x.reshape([found[axis] for axis in axes]).permute([axes.index(axis) for names in after for axis in names])
    return x.reshape([prod(found[axis] for axis in names) for names in after])


def _dims(side: str, further: int) -> list[list[str]]:
    """The axes of each dim of one side of a pattern: "(g n) 1 ..." with two more dims is [[g, n], [], [.0], [.1]]."""
    spelled = side.replace("...", " ".join(f".{number}" for number in range(further)))
    return [[] if dim == "1" else dim.strip("()").split() for dim in re.findall(r"\([^)]*\)|\S+", spelled)]


def _axis_sizes(size: int, names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes of the axes of a dim, of which one may not be among `sizes`."""
    rest = size // prod(sizes.get(name, 1) for name in names)
    return {name: sizes.get(name, rest) for name in names}


class VocabularyRows(Layout):
    """Rows of the vocabulary: ours are padded with zeros to the padded vocabulary."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter[: config.vocab_size],)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        first, last = (min(end, config.vocab_size or 0) for end in (box[0].start, box[0].stop))
        rows = tensors[0][(slice(first, last), *box[1:])]
        padding = box[0].stop - box[0].start - len(rows)
        return cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows


class StackedExperts(Layout):
    """Gate and up of all experts as [E, 2, ffn, h]; they store them expert by expert."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return parameter.flatten(0, 1).unbind()

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts = [tensors[2 * expert : 2 * expert + 2][box[1]] for expert in range(box[0].start, box[0].stop)]
        return stack([stack([tensor[box[2:]] for tensor in halves]) for halves in experts])


@dataclass(frozen=True)
class OneOfThree(Layout):
    """One number of three, which other parameters share a tensor of theirs with: those that have the same name are
    added up. Adding -0.0 changes no number."""

    place: int

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (cat([parameter if at == self.place else parameter.new_full((1,), -0.0) for at in range(3)]),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return tensors[0][(slice(self.place, self.place + 1),)][box]


class WithConstantsOfXIELU(Layout):
    """xIELU's second scalar, beside which they store its slope at zero and a bound of its exponent."""

    constants = 0.5, -1e-6

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        for tensor, value in zip(tensors[1:], self.constants, strict=True):
            if not torch.isclose(tensor.double(), torch.tensor(value).double(), rtol=0.01):
                raise ValueError(f"xIELU with {tensor.item()} is not supported; it must be {value}")
        return tensors[0]

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return parameter, *(parameter.new_tensor(value) for value in self.constants)


@dataclass(frozen=True)
class Reordered(Layout):
    """Another layout with the channels along a dim of ours in another order."""

    base: Layout
    dim: int
    order: Callable[[TransformerConfig], list[int]]
    """For each channel of ours the number of theirs."""

    but_values: bool = False
    """Whether the values of each query group, the last rows of dim 1, stay as they are."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        back = torch.tensor(self.order(config), device=parameter.device).argsort()
        return self.base.theirs(config, self._moved(config, parameter, back, range(config.queries_per_group + 2)))

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        order = self.order(config)
        read = (*box[: self.dim], slice(0, len(order)), *box[self.dim + 1 :])
        rows = range(box[1].start, box[1].stop) if self.but_values else range(0)
        whole = self.base.part(config, tensors, read)
        return self._moved(config, whole, torch.tensor(order), rows).narrow(
            self.dim, box[self.dim].start, box[self.dim].stop - box[self.dim].start
        )

    def _moved(self, config: TransformerConfig, x: Tensor, order: Tensor, rows: Sequence[int]) -> Tensor:
        moved = x.index_select(self.dim, order)
        if self.but_values and (last := config.queries_per_group + 1) in rows:
            moved[:, rows.index(last)] = x[:, rows.index(last)]
        return moved


def _pairs_of_halves(first: int, rotated: int) -> list[int]:
    """`first` channels as they are, then those of two halves as the pairs that rotate together."""
    return [*range(first), *(first + half + at for at in range(rotated // 2) for half in (0, rotated // 2))]


def _indexer_channels(config: TransformerConfig, heads: bool) -> list[int]:
    """Those of the heads of a sparse attention's indexer, or of its key. The first ones of each rotate."""
    width, rotated = _option(config, "dsa_indexer_head_dim"), config.rotary_dim
    of_head = [*_pairs_of_halves(0, rotated), *range(rotated, width)]
    return [
        width * head + at for head in range(_option(config, "dsa_indexer_n_heads") if heads else 1) for at in of_head
    ]


class DeltaNets(Protocol):
    """The shape of gated delta nets."""

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_channels: tuple[int, ...]


def delta_nets(config: TransformerConfig) -> DeltaNets:
    """The shape of gated delta nets: options of whichever extension states their heads."""
    found: DeltaNets = next(each for each in config.extension_options if hasattr(each, "linear_num_key_heads"))
    return found


def mamba_channels(config: TransformerConfig) -> tuple[int, int, int, int, int]:
    """Rows of a group in the projection of Mamba-2: gates, inputs, B, C and step sizes. Its shape is options of
    whichever extension states it."""
    channels, states = _option(config, "mamba_head_dim"), _option(config, "mamba_state_dim")
    all_heads = _option(config, "mamba_num_heads") or 2 * config.hidden_size // channels
    heads = all_heads // _option(config, "mamba_num_groups")
    width = heads * channels
    return width, width, states, states, heads


def _option(config: TransformerConfig, name: str) -> int:
    """The value of a flag of whichever extension states it."""
    return next(getattr(each, name) for each in config.extension_options if hasattr(each, name))


def _mamba_groups(config: TransformerConfig) -> dict[str, int]:
    return {"g": _option(config, "mamba_num_groups")}


def _kimi_heads(config: TransformerConfig) -> dict[str, int]:
    return {"g": _option(config, "kda_num_heads")}


def _query_groups(config: TransformerConfig) -> dict[str, int]:
    return {"g": config.query_groups, "d": config.head_dim, "pair": 2}


def _key_heads(config: TransformerConfig) -> dict[str, int]:
    return {"g": delta_nets(config).linear_num_key_heads}


def _of_key_heads(config: TransformerConfig) -> tuple[int, int]:
    """Rows of a key head in the two projections of a gated delta net."""
    *projected, beta, decay = delta_nets(config).linear_channels
    return sum(projected), beta + decay


def _of_group(*heads: str) -> Callable[[TransformerConfig], list[int]]:
    """Heads of a query group in each of their tensors: "q" for one a query, "pairs" for two."""
    numbers = {"q": 1, "pairs": 2}
    return lambda config: [numbers.get(each, 0) * config.queries_per_group or 1 for each in heads]


_GROUPS = "(g n d) ... -> g n d ..."

LAYOUTS: dict[str, Layout] = {
    "Same": Pieces(),
    # GPT-2 stores [in, out], we store [out, in]. A bias is the same on both sides.
    "Transposed": Pieces("... o -> o ..."),
    "VocabularyRows": VocabularyRows(),
    # Several tensors of one shape along a new first dim, such as gate and up of a gated MLP, or all experts.
    "Stacked": Pieces("... -> 1 ...", joined=0),
    "StackedExperts": StackedExperts(),
    # Gate and up of all experts as [E, 2, ffn, h], biases [E, 2, ffn]: all gates and all ups, [E, ffn, h] each.
    "StackedHalves": Pieces("e ... -> e 1 ...", joined=1),
    # [E, h, 2 * ffn] and [E, 2 * ffn], all gates before all ups (Llama 4); or each gate followed by its up (gpt-oss).
    "GateUpColumns": Pieces("e ... o -> e 1 o ...", joined=1, counts=lambda config: (1, 1), section=-1),
    "InterleavedGateUpColumns": Pieces("e ... (o pair) -> e pair o ...", lambda config: {"pair": 2}),
    # [2 * ffn, h], all gates before all ups (Phi 3, GLM), and the same of all experts (Granite).
    "GateUpRows": Pieces("(pair o) ... -> pair o ...", lambda config: {"pair": 2}),
    "ExpertGateUpRows": Pieces("e (pair o) ... -> e pair o ...", lambda config: {"pair": 2}),
    "RowOfExperts": Pieces("1 e -> e"),
    "TransposedExperts": Pieces("e i o -> e o i"),
    # q [heads * d, ...], k and v [groups * d, ...] as [groups, q_per_group + 2, d, ...]; with gates of the output as q.
    "QueryGroups": Pieces(_GROUPS, _query_groups, 1, _of_group("q", "k", "v")),
    "GatedQueryGroups": Pieces(_GROUPS, _query_groups, 1, _of_group("q", "q", "k", "v")),
    # The same with [heads * 2 * d, ...], each head's query before the gate of its output, and k and v.
    "QueryGatePairs": Pieces(
        ("(g q pair d) ... -> g (pair q) d ...", _GROUPS, _GROUPS), _query_groups, 1, _of_group("pairs", "k", "v")
    ),
    # Ling: the rows of all queries, then those of all keys, then those of all values in one tensor.
    "JoinedQueryGroups": Pieces(_GROUPS, _query_groups, 1, _of_group("q", "k", "v"), section=0),
    # GPT-2: the same along the last dim. A bias has no other dim.
    "JointHeads": Pieces("... (g n d) -> g n d ...", _query_groups, 1, _of_group("q", "k", "v"), section=-1),
    # BLOOM, GPT-NeoX: head by head its query, key and value: our order, three dims as one.
    "GroupByGroup": Pieces(_GROUPS, _query_groups),
    # CodeGen: four blocks of heads, each with all of its queries, then values, then keys.
    "BlocksOfHeads": Reordered(
        Pieces("(m p n d) ... -> (m n) p d ...", lambda config: {"m": 4, "p": 3, "d": config.head_dim}),
        1,
        lambda config: [0, 2, 1],
    ),
    "Heads": Pieces("(g d) ... -> g d ...", lambda config: {"g": config.num_attention_heads}),
    # Heads, and a latent, whose last channels are rotated as two halves; ours as pairs (MiniCPM 3).
    "HeadsOfHalves": Reordered(
        Pieces("(g d) ... -> g d ...", lambda config: {"g": config.num_attention_heads}),
        1,
        lambda config: _pairs_of_halves(config.head_dim - config.rotary_dim, config.rotary_dim),
    ),
    "LatentOfHalves": Reordered(
        Pieces(), 0, lambda config: _pairs_of_halves(_option(config, "kv_lora_rank"), config.rotary_dim)
    ),
    # The heads of an indexer, and its key, whose first channels are rotated as two halves (DeepSeek-V3.2).
    "IndexerHeadsOfHalves": Reordered(Pieces(), 0, lambda config: _indexer_channels(config, heads=True)),
    "IndexerKeyOfHalves": Reordered(Pieces(), 0, lambda config: _indexer_channels(config, heads=False)),
    # Heads that are rotated the other way round, so that their halves change places (nanochat).
    "SwappedQueryGroups": Reordered(
        Pieces(_GROUPS, _query_groups, 1, _of_group("q", "k", "v")),
        2,
        lambda config: [(at + config.head_dim // 2) % config.head_dim for at in range(config.head_dim)],
        but_values=True,
    ),
    # Queries, gates if there are any, keys and values whose heads differ in width, side by side in each group.
    "RowsOfGroups": Pieces(
        "(g n) ... -> g n ...",
        lambda config: {"g": config.query_groups},
        1,
        lambda config: [rows for rows in group_rows(config) if rows],
    ),
    # The same for the two projections of a gated delta net, by key heads (Qwen3-Next).
    "KeyHeads": Pieces("(g n) ... -> g n ...", _key_heads, 1, _of_key_heads),
    # The same for the rows of all queries, keys and values, of all gates, and of both numbers of each head (Qwen3.5).
    "KeyHeadsApart": Pieces(
        "(g n) ... -> g n ...", _key_heads, 1, lambda config: delta_nets(config).linear_channels, section=0, sections=3
    ),
    # The same for six tensors, and the convolutions of the first three (Olmo Hybrid).
    "KeyHeadsOfEach": Pieces("(g n) ... -> g n ...", _key_heads, 1, lambda c: delta_nets(c).linear_channels),
    "ConvolutionsOfEach": Pieces(
        "(g n) 1 t -> g n t", _key_heads, 1, lambda c: delta_nets(c).linear_channels[:3], may_be_thirds=True
    ),
    # [channels, 1, taps], those of all queries, keys and values, as [key heads, channels of each, taps].
    "ConvolvedHeads": Pieces(
        "(g n) 1 t -> g n t", _key_heads, 1, lambda config: delta_nets(config).linear_channels[:3], section=0
    ),
    # Mamba-2: one tensor with the gates of all groups, then their inputs, B, C and step sizes; and the convolutions of
    # inputs, B and C, weights [channels, 1, taps] and biases.
    "GroupsOfHeads": Pieces("(g n) ... -> g n ...", _mamba_groups, 1, mamba_channels, section=0),
    "ConvolvedGroups": Pieces("(g n) 1 t -> g n t", _mamba_groups, 1, lambda c: mamba_channels(c)[1:4], section=0),
    "GroupsOfBiases": Pieces("(g n) -> g n", _mamba_groups, 1, lambda c: mamba_channels(c)[1:4], section=0),
    # Of each head, query, key and value in one tensor, and the gate in another (the lightning attention of MiniMax).
    "HeadsAndGates": Pieces(
        "(g n) ... -> g n ...",
        lambda config: {"g": config.num_attention_heads},
        1,
        lambda config: (3 * config.head_dim, config.head_dim),
    ),
    # Mamba-1: decays of all channels, each of several states, as one dim.
    "FlatStates": Pieces("c n -> (c n)", lambda config: {"n": _option(config, "mamba1_state_dim")}),
    # Kimi Delta Attention: of each head, query, key, value and writing strength, four tensors; the convolutions of the
    # first three; rows of low-rank projections; decays.
    "KimiHeads": Pieces(
        "(g n) ... -> g n ...", _kimi_heads, 1, lambda config: (*(_option(config, "kda_head_dim"),) * 3, 1)
    ),
    "KimiConvolutions": Pieces(
        "(g n) 1 t -> g n t", _kimi_heads, 1, lambda config: (_option(config, "kda_head_dim"),) * 3
    ),
    "KimiRows": Pieces("(g d) ... -> g d ...", _kimi_heads),
    "KimiDecays": Pieces("1 1 g 1 -> g"),
    # Outputs of groups of heads, [groups * rank, channels of a group], and factors of hyper-connections (DeepSeek-V4).
    "OutputGroups": Pieces(
        "(g r) ... -> g r ...",
        lambda config: {"g": _option(config, "o_groups")},
    ),
    **{name: OneOfThree(place) for place, name in enumerate(("FirstOfThree", "SecondOfThree", "ThirdOfThree"))},
    # Three projections of one width, one behind the other (the short convolution of LFM2).
    "Thirds": Pieces("(third c) ... -> third c ...", lambda config: {"third": 3}),
    "WithConstantsOfXIELU": WithConstantsOfXIELU(),
}
