"""Bit-exact conversion between parameters of this program and Hugging Face tensors. This module defines the layout
classes. `named_layouts` defines the layouts that a family file can select by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor, cat, stack

from megatron.core.config.model import TransformerConfig
from megatron.extensions.interop.hugging_face.safetensors_file import Sliceable

Box = tuple[slice, ...]
"""Region of a tensor, given as one slice per dim. Each slice has a start and a stop."""


class Layout:
    """Bit-exact conversion between a parameter and Hugging Face tensors."""

    def ours(self, config: TransformerConfig, tensors: Sequence[Tensor]) -> Tensor:
        """Convert Hugging Face tensors to a parameter. The tensors have the shapes that `theirs` returns."""
        raise NotImplementedError

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        """Convert a parameter, which may be on the meta device, to Hugging Face tensors."""
        raise NotImplementedError

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        """Return the slice `box` of a parameter. The Hugging Face tensors may be on disk. Subclasses override this
        method to read only parts of the tensors.
        """
        return self.ours(config, [tensor[()] for tensor in tensors])[box]

    def of_layer(self, number: int) -> Layout:
        """Return the layout of the parameter in layer `number`. The result differs from `self` only if one Hugging Face
        tensor contains the parameters of all layers."""
        return self


@dataclass(frozen=True)
class Pieces(Layout):
    """Layout in which a parameter is a concatenation of pieces. Each piece is a Hugging Face tensor, or a section of a
    Hugging Face tensor, with rearranged dims."""

    pattern: str | tuple[str, ...] = "... -> ..."
    """Rearrangement pattern, such as "(g n d) ... -> g n d ...". The left side of the arrow lists the dims of the
    Hugging Face tensor, and the right side lists the dims of the piece.

    Axes in parentheses form one dim in row-major order. In a pattern, "1" is a dim of size 1, and "..." represents all
    other dims. If the pieces have different patterns, `pattern` is a tuple with one pattern for each piece.
    """

    sizes: Callable[[TransformerConfig], Mapping[str, int]] = lambda config: {}
    """Function that returns the sizes of the axes in the pattern. If a dim consists of several axes, one of the axes
    may be omitted. The size of the omitted axis is computed."""

    joined: int | None = None
    """Dim of the parameter along which pieces are concatenated; None for a single piece."""

    counts: Callable[[TransformerConfig], Sequence[int]] | None = None
    """Function that returns the size of each piece along the dim `joined` of the parameter. None if every piece has
    size 1."""

    section: int | None = None
    """Dim along which several pieces are concatenated in one Hugging Face tensor. The sizes of the pieces are in
    proportion to `counts`. None if each piece is a separate tensor."""

    sections: int | None = None
    """Number of pieces that are concatenated in the first Hugging Face tensor; every other tensor contains a single
    piece. None if all pieces are concatenated in one tensor."""

    may_be_thirds: bool = False
    """True if some files divide the rows of these tensors equally among the tensors instead of according to `counts`.
    When transformers divides a fused tensor into equal parts, it writes files with equal numbers of rows."""

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
        """Read the slice `box` of a piece. If a dim of the Hugging Face tensor consists of several axes, only the
        required range of the outermost axis is read. The other axes are sliced after reading."""
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
    """View of one section of a tensor. The dim `dim` is divided into sections whose sizes are in proportion to
    `counts`, and this view is section number `at`."""

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
    """Rearrange a tensor from the pattern `source` to the pattern `target`, as einops.rearrange does. `sizes` contains
    the sizes of axes in the patterns."""
    further = x.ndim - len(_dims(source, 0))
    before, after = _dims(source, further), _dims(target, further)
    found: dict[str, int] = {}
    for size, names in zip(x.shape, before, strict=True):
        found |= _axis_sizes(size, names, sizes)
    axes = [axis for names in before for axis in names]
    x = x.reshape([found[axis] for axis in axes]).permute([axes.index(axis) for names in after for axis in names])
    return x.reshape([prod(found[axis] for axis in names) for names in after])


def _dims(side: str, further: int) -> list[list[str]]:
    """Return the names of the axes in each dim on one side of a pattern. The ellipsis is replaced by `further` dims.
    For example, "(g n) 1 ..." is converted to [[g, n], [], [.0], [.1]] if `further` is 2."""
    spelled = side.replace("...", " ".join(f".{number}" for number in range(further)))
    return [[] if dim == "1" else dim.strip("()").split() for dim in re.findall(r"\([^)]*\)|\S+", spelled)]


def _axis_sizes(size: int, names: Sequence[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of the axes that form a dim of size `size`. One of the axes may be missing from `sizes`."""
    rest = size // prod(sizes.get(name, 1) for name in names)
    return {name: sizes.get(name, rest) for name in names}


@dataclass(frozen=True)
class HeadsOfGroups(Layout):
    """Layout of linear_qkv.

    If all heads have the same width, the shape of the parameter is [groups, heads, channels of a head, ...]. If the
    head widths differ, the shape is [groups, rows, ...].
    """

    even: Layout
    uneven: Layout

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return self._of(config).theirs(config, parameter)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return self._of(config).part(config, tensors, box)

    def _of(self, config: TransformerConfig) -> Layout:
        return self.even if config.has_even_heads else self.uneven


class VocabularyRows(Layout):
    """Layout of a parameter with one row per token. The parameter is zero-padded to the padded vocabulary size."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (parameter[: config.vocab_size],)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        first, last = (min(end, config.vocab_size or 0) for end in (box[0].start, box[0].stop))
        rows = tensors[0][(slice(first, last), *box[1:])]
        padding = box[0].stop - box[0].start - len(rows)
        return cat((rows, rows.new_zeros(padding, *rows.shape[1:]))) if padding else rows


class StackedExperts(Layout):
    """Layout of the gate and up weights of all experts, [E, 2, ffn, h]. In Hugging Face files, the gate and up weights
    of each expert are two separate tensors."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return parameter.flatten(0, 1).unbind()

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        experts = [tensors[2 * expert : 2 * expert + 2][box[1]] for expert in range(box[0].start, box[0].stop)]
        return stack([stack([tensor[box[2:]] for tensor in halves]) for halves in experts])


@dataclass(frozen=True)
class OneOfThree(Layout):
    """Layout of a parameter with a single element. A Hugging Face tensor of three elements contains this parameter and
    two other parameters.

    When files are written, each parameter contributes a tensor in which the elements of the other parameters are -0.0.
    These tensors are summed, and adding -0.0 does not change any value.
    """

    place: int

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        return (cat([parameter if at == self.place else parameter.new_full((1,), -0.0) for at in range(3)]),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        return tensors[0][(slice(self.place, self.place + 1),)][box]


@dataclass(frozen=True)
class RowsOfEachHead(Layout):
    """Layout of a parameter that consists of some rows of each attention head in a Hugging Face tensor. The remaining
    rows of the Hugging Face tensor contain other parameters. When files are written, each parameter contributes a
    tensor in which the rows of the other parameters are -0.0. These tensors are summed, and adding -0.0 does not change
    any value.
    """

    rows: Callable[[TransformerConfig], tuple[int, int, int]]
    """Function that returns three numbers of rows per head: the rows before this parameter, the rows of this parameter,
    and the rows after this parameter."""

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        before, _, after = self.rows(config)
        whole = parameter.new_full((len(parameter), before + parameter.shape[1] + after, *parameter.shape[2:]), -0.0)
        whole[:, before : before + parameter.shape[1]] = parameter
        return (whole.flatten(0, 1),)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        before, own, after = self.rows(config)
        of_head = before + own + after
        heads = tensors[0][(slice(box[0].start * of_head, box[0].stop * of_head), *box[2:])].unflatten(0, (-1, of_head))
        return heads[:, before + box[1].start : before + box[1].stop]


@dataclass(frozen=True)
class PartOfLayer(Layout):
    """Layout for a Hugging Face tensor that contains the parameters of all layers. The Hugging Face tensor is divided
    along one dim into parts of equal size, one part for each layer. When files are written, each layer contributes a
    tensor in which the parts of all other layers are -0.0. These tensors are summed, and adding -0.0 does not change
    any value.
    """

    dim: int
    layer: int = 0

    def of_layer(self, number: int) -> Layout:
        return replace(self, layer=number)

    def theirs(self, config: TransformerConfig, parameter: Tensor) -> tuple[Tensor, ...]:
        shape, size = [*parameter.shape], parameter.shape[self.dim]
        shape[self.dim] *= config.num_layers
        whole = parameter.new_full(shape, -0.0)
        whole.narrow(self.dim, self.layer * size, size).copy_(parameter)
        return (whole,)

    def part(self, config: TransformerConfig, tensors: Sequence[Sliceable], box: Box) -> Tensor:
        slices, start = list(box), self.layer * (tensors[0].shape[self.dim] // config.num_layers)
        slices[self.dim] = slice(start + box[self.dim].start, start + box[self.dim].stop)
        return tensors[0][tuple(slices)]


class WithConstantsOfXIELU(Layout):
    """Layout of the second trainable scalar of the activation function xIELU. Hugging Face files also contain two
    constants of xIELU: the slope at zero and a bound on the exponent."""

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
    """Layout that applies another layout and reorders the channels along one dim of the parameter."""

    base: Layout
    dim: int
    order: Callable[[TransformerConfig], list[int]]
    """Function that returns, for each channel of the parameter, the index of the same channel in the Hugging Face
    tensor."""

    but_values: bool = False
    """True if the channels of queries and keys are reordered, but the channels of values are not. The values of a query
    group are the last rows of dim 1."""

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
