"""Parameter names in Megatron-LM checkpoints, and the locations of this program's parameters in torch_dist checkpoints.

Identical layers may be stacked along a new first dim under one name. If layers are not stacked, each layer's tensors
have their own names. Megatron-LM tensors have the same elements as this program's parameters, but different shapes.
Megatron-LM merges query groups, heads and channels into one dim. Megatron-LM also merges the gate rows and the up rows
of a gated MLP into one dim. In a HybridModel, attention and MLP are two separate layers, also in multi-token prediction
modules, and hyper-connections wrap each of these layers. Parameters whose names differ between Megatron-LM and this
program are listed in three tables of `names.json`. A row of the table `renamed` replaces the beginning of a parameter's
name within its layer. A row with the key `beside` applies only to layers that also have a parameter whose name begins
with the value of `beside`. A tensor is written under all names in `theirs` and can be read from any of these names.
Rows of the table `kinds` describe parameters that Megatron-LM splits into several tensors, one for each kind of
channel, such as queries and keys. In Megatron-LM, a tensor with one kind of channel contains all groups; in this
program's parameter, all channels of a group are adjacent. For some kinds, the number of channels per group is the size
of the last dim of another parameter of the module, divided by the number of groups. The channels that remain are
divided equally among the other kinds. Rows of the table `older` rename tensors of checkpoints that predate Megatron
Core.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import model_states
from megatron.extensions.interop.conversion.formats import few

EXTRA_STATE = "_extra_state"
"""Name suffix of Transformer Engine's fp8 state."""

LAYERS = "decoder.layers."
STACKED = re.compile(r"^decoder\.layers\.\d+\.")
CONNECTION = "_hyper_connection."

OF_TOKENS = ".tid2eid"
"""Name suffix of tables with one row per token."""

IN_LAYER = re.compile(
    r"(?P<front>decoder\.layers\.(?P<number>\d+)\."
    r"|mtp\.layers\.\d+\.transformer_layer\.)(?P<inside>.+)"
)

TABLES = json.loads(Path(__file__).with_name("names.json").read_text())


@dataclass(frozen=True)
class Rule:
    """Rule that maps a parameter name of this program to one or more Megatron-LM names. Each rule is a row of the table
    `renamed` or `kinds`."""

    ours: str
    theirs: Sequence[str] | Mapping[str, str | None]
    beside: str = ""
    hybrid: bool | None = None

    def holds(self, inside: str, siblings: Iterable[str], hybrid: bool) -> bool:
        """Return True if the rule applies to a parameter. `inside` is the name of the parameter without the prefix of
        its layer. `siblings` contains the names of all parameters in the layer. `hybrid` is True for a HybridModel."""
        same = inside.startswith(self.ours) and self.hybrid in (None, hybrid)
        return same and any(sibling.startswith(self.beside) for sibling in siblings)


RENAMED, KINDS = (tuple(Rule(**row) for row in TABLES[name]) for name in ("renamed", "kinds"))


@dataclass(frozen=True)
class Way:
    """Description of one way in which files may store a parameter, or one rank's shard of the parameter."""

    names: tuple[str, ...]
    """Names of the tensors that form the parameter, in order."""
    shape: tuple[int, ...] = ()
    """Shape of each tensor that forms the parameter, as stored in the files of one rank."""
    layer: int | None = None
    """Index of the layer along the first dim, if the tensors of several layers are stacked. None if the tensors are not
    stacked."""
    transposed: bool = False
    """True if one tensor contains all experts as [experts, input channels, output channels]."""
    kinds: tuple[int, ...] = ()
    """Number of channels per group for each kind of channel, such as queries and keys. The tuple is empty if the rows
    of the stored tensor are not ordered by kind of channel."""

    def whole(self, tensors: Sequence[Tensor], shape: tuple[int, ...]) -> Tensor:
        """Assemble a parameter of shape `shape` from the tensors that store it."""
        if not self.kinds:
            flat = [tensor.flatten() for tensor in tensors]
            return (flat[0] if len(flat) == 1 else torch.cat(flat)).reshape(shape)
        rows = torch.cat([tensor.flatten() for tensor in tensors]).reshape(-1, *shape[2:])
        parts = rows.split([shape[0] * width for width in self.kinds])
        return torch.cat([part.reshape(shape[0], -1, *shape[2:]) for part in parts], dim=1)


def find_ways(
    metas: Mapping[str, ParamMeta],
    ways_of: Callable[[ParamMeta], Iterable[Way]],
    present: Collection[str],
    misfits: Callable[[ParamMeta, Way], Iterable[str]],
    optional: Collection[str] = (),
    used: Iterable[str] = (),
) -> dict[str, Way]:
    """Determine how the files store each parameter. `present` contains the names of the tensors in the files, and
    `ways_of` returns the possible ways to store a parameter. The result maps each parameter name to the first `Way`
    whose tensors all exist. Raises ValueError with a list of problems: missing parameters that are not `optional`,
    tensors of the wrong shape (which `misfits` finds), and unknown tensors. A tensor is unknown if it is not in `used`
    and does not belong to any parameter."""
    found = dict[str, Way]()
    problems = []
    known = set(used)
    for name, meta in metas.items():
        ways = list(ways_of(meta))
        way = next((way for way in ways if all(each in present for each in way.names)), None)
        if way is None:
            problems += [] if name in optional else [f"{name} is missing"]
            continue
        known |= {each for way in ways for each in way.names}
        found[name] = way
        problems += misfits(meta, way)
    problems += [f"{name} is unknown" for name in sorted({*present} - known) if not is_skipped(name)]
    if problems:
        raise ValueError(few(problems, 6))
    return found


def is_skipped(key: str) -> bool:
    """Return True if a Megatron-LM tensor is ignored because it is a buffer or fp8 state."""
    return key.endswith(EXTRA_STATE) or "rotary_pos_emb.inv_freq" in key or key.endswith("local_tokens_per_expert")


def stacked_misfits(shapes: Mapping[str, tuple[int, ...]], num_layers: int, meta: ParamMeta, way: Way) -> Iterator[str]:
    """Yield the shape mismatches of a parameter's tensors in a torch_dist checkpoint."""
    expected, count = their_shape(meta), len(way.names)
    parts = count > 1 and not way.kinds
    for number, name in enumerate(way.names):
        rows = (meta.global_shape[0] * way.kinds[number], *expected[1:]) if way.kinds else expected
        wanted = (*(() if way.layer is None else (num_layers,)), *rows)
        shape = shapes[name]
        fits = prod(shape) * count == meta.numel and (not meta.matrix or shape[-1:] == expected[-1:])
        if not (fits if parts else shape == wanted):
            yield f"{name} has shape {list(shape)}, not {f'one of {count} parts of ' * parts}{list(wanted)}"


def their_shape(meta: ParamMeta) -> tuple[int, ...]:
    """Return the shape that a parameter has in Megatron-LM checkpoints, without a dim for stacked layers."""
    experts, shape = meta.global_shape[: meta.expert], meta.global_shape[meta.expert :]
    if meta.role == "state":
        return shape
    if meta.name.endswith("bias") or not meta.matrix:
        return (*experts, prod(shape))
    between = (1,) if meta.role == "convolution" else ()
    return (*experts, prod(shape[:-1]), *between, shape[-1])


def their_states(model: TransformerConfig) -> dict[str, tuple[ParamMeta, torch.dtype]]:
    """Return the metadata and dtypes of a model's untrained tensors, such as expert biases, as Megatron-LM stores them.
    Megatron-LM stores tables with one row per token as int32, and pads these tables to the padded vocabulary size."""
    found = {}
    for meta, dtype in model_states(model):
        table = meta.name.endswith(OF_TOKENS)
        meta = replace(meta, global_shape=(model.padded_vocab_size, *meta.global_shape[1:])) if table else meta
        found[meta.name] = meta, torch.int32 if table else getattr(torch, dtype)
    return found


def with_rows(table: Tensor, rows: int) -> Tensor:
    """Truncate or zero-pad a table to `rows` rows."""
    return table if len(table) == rows else F.pad(table[:rows], (0, 0, 0, max(0, rows - len(table))))


def _in_layer(name: str) -> tuple[str, int | None, str]:
    """Split a parameter name into the prefix of its layer, the number of the layer in the decoder, and the name within
    the layer."""
    match = IN_LAYER.fullmatch(name)
    if match is None:
        return "", None, name
    return match["front"], None if match["number"] is None else int(match["number"]), match["inside"]


class Piece(NamedTuple):
    """Megatron-LM tensor that stores a part of a parameter. `names` contains the possible names of the tensor, and
    `shape` is the tensor's shape. In each group, the tensor contains only the channels in the slice `channels`."""

    names: list[str]
    channels: slice
    shape: tuple[int, ...]


class Names:
    """Names of a model's parameters in Megatron-LM's checkpoints.

    `metas` contains all parameters and all untrained tensors, such as expert biases. `hybrid` is True for a
    HybridModel, which is described by a layer pattern, and False for a GPTModel. Megatron-LM fuses a norm with the
    following linear layer, and names the norm after this layer. The norm before experts is not fused: checkpoints
    written with Transformer Engine store it under a separate name, and other checkpoints store it under the name of a
    fused norm.
    """

    def __init__(self, metas: Iterable[ParamMeta], hybrid: bool) -> None:
        self.hybrid = hybrid
        self.layers: dict[str, dict[str, ParamMeta]] = {}
        for meta in metas:
            front, _, inside = _in_layer(meta.name)
            self.layers.setdefault(front, {})[inside] = meta

    def _renamed(self, front: str, inside: str) -> Iterator[list[str]]:
        """Yield lists of possible Megatron-LM names for a layer's parameter. `front` is the prefix of the layer in this
        program, and `inside` is the parameter's name without this prefix. There is one list for each rule that applies,
        followed by a list with the unchanged name."""
        theirs = self._front(front, inside)
        for rule in RENAMED:
            if rule.holds(inside, self.layers[front], self.hybrid):
                yield [theirs + each + inside.removeprefix(rule.ours) for each in rule.theirs]
        yield [theirs + inside]

    def _front(self, front: str, inside: str) -> str:
        """Return Megatron-LM's name prefix of the layer that contains a parameter. `front` is the prefix of the layer
        in this program, and `inside` is the parameter's name without this prefix."""
        siblings = self.layers[front]
        if not self.hybrid:
            return front
        mixes = any(each.startswith("self_attention.") for each in siblings)
        second = mixes and inside.startswith(("mlp.", "pre_mlp_"))
        wrapped = CONNECTION not in inside and any(CONNECTION in each for each in siblings)
        front = front.replace(".transformer_layer.", f".mtp_model_layer.layers.{int(second)}.")
        return front + "inner_layer." * wrapped

    def kinds(self, meta: ParamMeta) -> dict[str, int]:
        """Return the number of channels per group for each kind of channel, such as queries and keys. The result is
        empty if Megatron-LM stores all kinds in a single tensor."""
        front, _, inside = _in_layer(meta.name)
        for rule in KINDS:
            if rule.holds(inside, self.layers[front], self.hybrid) and isinstance(rule.theirs, Mapping):
                return self._widths(meta, front + inside.split(".")[0], rule.theirs)
        return {}

    def _widths(self, meta: ParamMeta, module: str, kinds: Mapping[str, str | None]) -> dict[str, int]:
        groups, channels = meta.global_shape[:2]
        widths = {}
        for kind, other in kinds.items():
            if other is not None:
                front, _, inside = _in_layer(f"{module}.{other}")
                widths[kind] = self.layers[front][inside].global_shape[-1] // groups
        rest = (channels - sum(widths.values())) // max(1, len(kinds) - len(widths))
        return {kind: widths.get(kind, rest) for kind in kinds}

    def written(self, meta: ParamMeta, stacked: bool) -> tuple[list[Piece], int | None]:
        """Return the tensors that megatron-core expects for a parameter, and the parameter's index in the stack of
        layers. The index is None if layers are not stacked."""
        front, number, inside = _in_layer(meta.name)
        layer, names = number if stacked else None, next(self._renamed(front, inside))
        names = names if layer is None else [STACKED.sub(LAYERS, each) for each in names]
        shape, start = their_shape(meta), 0
        pieces: list[Piece] = []
        for kind, width in self.kinds(meta).items():
            rows = (meta.global_shape[0] * width, *shape[1:])
            pieces.append(Piece([f"{name}.{kind}" for name in names], slice(start, start + width), rows))
            start += width
        return pieces or [Piece(names, slice(None), shape)], layer

    def inside(self, meta: ParamMeta) -> Iterator[str]:
        """Yield all names that a dense parameter may have in the state dict of a Megatron-LM model. The names include
        the layer number."""
        front, _, inside = _in_layer(meta.name)
        yield from dict.fromkeys(each for theirs in self._renamed(front, inside) for each in theirs)

    def ways(self, meta: ParamMeta) -> Iterator[Way]:
        """Yield every way in which torch_dist may store a parameter."""
        number, kinds = _in_layer(meta.name)[1], self.kinds(meta)
        for own in self.inside(meta):
            for name, layer in {STACKED.sub(LAYERS, own): number, own: None}.items():
                names = tuple(f"{name}.{kind}" for kind in kinds) or (name,)
                yield Way(names, layer=layer, kinds=tuple(kinds.values()))
            yield Way((f"{own}_w", f"{own}_v"))
            if meta.expert:
                # Each expert has one tensor, or one tensor for the gate (w) and one tensor for up (v).
                experts = range(meta.global_shape[0])
                each = [own.replace(".experts.experts.", f".experts.experts.{expert}.") for expert in experts]
                yield Way(tuple(each))
                yield Way(tuple(f"{expert}_{half}" for expert in each for half in "wv"))


OLD_NAMES = tuple((re.compile(old), new) for old, new in TABLES["older"])
"""Pairs (pattern, replacement) that rename tensors of checkpoints from before Megatron Core."""


def current_name(name: str) -> str:
    """Translate an older tensor name to its current name."""
    for old, new in OLD_NAMES:
        name = old.sub(new, name)
    return name
