"""Conversion of weights between Hugging Face's and this program's formats, which differ in tensor names and layouts.
The conversion follows the tables of the model's family, whose format `families` defines.

This module does not open files. The tensors that it receives may be in memory, or on disk and read in slices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.multi_token import MULTI_TOKEN
from megatron.core.param_meta import ParamMeta
from megatron.core.pipeline_parallel.stage_parameters import model_states, stage_metas
from megatron.extensions.interop.conversion.formats import few
from megatron.extensions.interop.hugging_face.buffers import buffers_of
from megatron.extensions.interop.hugging_face.families import Family, Rule
from megatron.extensions.interop.hugging_face.layouts import Box, Layout, Pieces
from megatron.extensions.interop.hugging_face.named_layouts import LAYOUTS
from megatron.extensions.interop.hugging_face.read_config import family_of
from megatron.extensions.interop.hugging_face.safetensors_file import Sliceable


@dataclass(frozen=True)
class Placement:
    """Parameter or untrained buffer ("state") of this program's model, and the names of the Hugging Face tensors from
    which it is assembled."""

    meta: ParamMeta
    theirs: tuple[str, ...]
    layout: Layout

    config: TransformerConfig
    """Configuration of the layer to which the parameter or state belongs."""

    state_dtype: str | None = None
    """Dtype of an untrained state, or None for a parameter."""

    def to_theirs(self, parameter: Tensor) -> tuple[Tensor, ...]:
        """Convert the parameter to Hugging Face tensors, in the order of the names in `theirs`."""
        return self.layout.theirs(self.config, parameter)


class HFWeights:
    """Reader that assembles this program's parameters from Hugging Face tensors. Each call of `read` returns one
    parameter or a slice of one parameter.

    The constructor checks names, shapes and dtypes without reading data, and raises ValueError with a list of all
    mismatches. The number of multi-token prediction modules in the files may differ from the number in the model. Only
    modules that exist both in the files and in the model are read.
    """

    def __init__(self, tensors: Mapping[str, Sliceable], config: TransformerConfig, model_type: str) -> None:
        family = family_of({"model_type": model_type})
        self.config, self._tensors = config, _checkpoint_names(tensors, family)
        if "mxfp4" in family.quantized:
            self._tensors = with_mxfp4(self._tensors)
        problems = _too_few(self._tensors, config, family)
        stored = multi_token_depths(self._tensors, config, model_type)
        self.depths = min(config.mtp_depths, stored)
        """Number of multi-token prediction depths whose weights are read."""
        placed = [] if problems else placements(_with_depths(config, self.depths), model_type)
        self.placements = {each.meta.name: each for each in placed}
        buffers = (name for name, _ in buffers_of(config, family.model_type, torch.float32)) if placed else ()
        of_config = {*takewhile(self._tensors.__contains__, buffers)}
        unknown = {name: tensor for name, tensor in self._tensors.items() if name not in of_config}
        for placement in self.placements.values():
            if isinstance(placement.layout, Pieces) and placement.layout.may_be_thirds:
                self._tensors |= by_counts(self._tensors, placement)
            missing = [name for name in placement.theirs if name not in self._tensors]
            problems += [f"{name} is missing" for name in missing] or self._misfit(placement)
            for name in placement.theirs:
                unknown.pop(name, None)
        self.head = _head(family)
        self.tied_head = unknown.pop(self.head, None) if config.tied_embeddings and self.placements else None
        if self.placements:
            whole = _with_depths(config, stored)
            self.copies = [each for each in copies(whole, model_type) if unknown.pop(each.theirs[0], None) is not None]
            further = {name for each in placements(whole, model_type) for name in each.theirs} if stored else set()
            further |= {name for name in unknown if name.endswith(tuple(family.unread))}
            problems += [f"{name} is unknown" for name in unknown if name not in further]
        if problems:
            raise ValueError(f"weights of model_type {model_type}: {few(problems, 8)}")

    def _misfit(self, placement: Placement) -> list[str]:
        """Return a list with an error message if the tensors of a parameter do not match the model, and an empty list
        otherwise."""
        tensors, names = [self._tensors[name] for name in placement.theirs], ", ".join(placement.theirs)
        try:
            found = [list(tensor.shape) for tensor in tensors]
        except ValueError as error:
            return [f"{names}: {error}"]
        shapes = ", ".join(map(str, found))
        try:
            whole = torch.empty(placement.meta.global_shape, device="meta")
            expected = [list(tensor.shape) for tensor in placement.to_theirs(whole)]
        except (RuntimeError, ValueError, TypeError, IndexError):
            return [f"{names} of shape {shapes} do not fit the configuration"]
        if found != expected:
            needed = ", ".join(map(str, expected))
            return [f"{names} of shape {shapes} do not fit {placement.meta.name}, which needs {needed}"]
        return []

    def dtypes(self, name: str) -> set[torch.dtype]:
        """Return the set of dtypes in which the Hugging Face tensors of a parameter are stored."""
        return {self._tensors[part].dtype for part in self.placements[name].theirs}

    def read(self, name: str, box: Box | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Read a parameter, or only the slice `box` of the parameter. If no dtype is requested, the tensor is returned
        in its stored dtype."""
        placement = self.placements[name]
        tensors: Sequence[Sliceable] = [self._tensors[part] for part in placement.theirs]
        if dtype is not None:
            tensors = [_Converted(tensor, dtype) for tensor in tensors]
        whole = tuple(slice(0, size) for size in placement.meta.global_shape)
        return placement.layout.part(placement.config, tensors, box or whole)

    def check_copies(self) -> None:
        """Raise ValueError if the files contain several copies of tied weights and the copies differ.

        Files may contain a copy of the embedding as the output head, and copies of the embedding or the output head in
        multi-token prediction modules. This method reads the copies and the original tensors to compare them.
        """
        for copy in self.copies:
            (name,), (original,) = copy.theirs, self.placements[copy.meta.name].theirs
            if not torch.equal(self._tensors[name][()], self._tensors[original][()]):
                raise ValueError(f"{name} differs from {original}, which the multi-token prediction module shares")
        embedding = self._tensors[self.placements[EMBEDDING].theirs[0]] if self.tied_head is not None else None
        if self.tied_head is not None and embedding is not None:
            shapes = tuple(self.tied_head.shape), tuple(embedding.shape)
            if shapes[0] != shapes[1] or not torch.equal(self.tied_head[()], embedding[()]):
                raise ValueError(f"{self.head} differs from the word embeddings, but config.json ties both")


def by_counts(tensors: Mapping[str, Sliceable], placement: Placement) -> dict[str, Sliceable]:
    """Some files divide the rows of a parameter equally among its tensors, although the parameter's layout requires
    different numbers of rows. Return views that correct the division: in the views, each tensor has the number of rows
    that the layout requires. If the files divide the rows in any other way, return an empty dict."""
    parts = [tensors[name] for name in placement.theirs if name in tensors]
    whole = placement.to_theirs(torch.empty(placement.meta.global_shape, device="meta"))
    expected = [tuple(tensor.shape) for tensor in whole]
    found = [tuple(tensor.shape) for tensor in parts]
    rows = sum(shape[0] for shape in expected)
    if found != [(rows // len(expected), *expected[0][1:])] * len(expected) or found == expected or rows % len(found):
        return {}
    starts = [sum(shape[0] for shape in expected[:number]) for number in range(len(expected))]
    return {
        name: RowsOfSeveral(tuple(parts), start, shape)
        for name, start, shape in zip(placement.theirs, starts, expected, strict=True)
    }


@dataclass(frozen=True)
class RowsOfSeveral:
    """View of rows that span several tensors. The tensors `parts` have equal shapes and are treated as if they were
    concatenated along dim 0. The view begins at row `start` of the concatenation."""

    parts: tuple[Sliceable, ...]
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        rows, *others = box if isinstance(box, tuple) and box else (slice(None),)
        first, last, _ = rows.indices(self.shape[0])
        size, found = self.parts[0].shape[0], []
        for number, part in enumerate(self.parts):
            low, high = (min(max(self.start + row - number * size, 0), size) for row in (first, last))
            if low < high:
                found.append(part[(slice(low, high), *others)])
        return torch.cat(found)


EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def _head(family: Family) -> str:
    """Return the Hugging Face name of the output weight."""
    return next(rule.theirs[0] for rule in family.rules if rule.ours == HEAD)


@dataclass(frozen=True)
class _Converted:
    """Tensor that is converted to `dtype` when a slice of it is read."""

    tensor: Sliceable
    dtype: torch.dtype

    @property
    def shape(self) -> Sequence[int]:
        return self.tensor.shape

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return self.tensor[box].to(self.dtype)


def placements(config: TransformerConfig, model_type: str) -> list[Placement]:
    """Return, for each parameter and state of a model, the Hugging Face tensors that store it. Multi-token prediction
    modules are omitted if the family does not support them. Raises ValueError if the family has no tensor for one of
    the remaining parameters or states.
    """
    family = family_of({"model_type": model_type})
    rules = {rule.ours: rule for rule in (*family.rules, *family.multi_token)}
    found = []
    config = _with_depths(config, config.mtp_depths if family.multi_token else 0)
    states = model_states(config)
    for meta, state_dtype in [*((meta, None) for meta in stage_metas(config)), *states]:
        parts = meta.name.split(".")
        module = meta.name.startswith(f"{MULTI_TOKEN}.")
        layer = parts[2] if module or meta.name.startswith("decoder.layers.") else ""
        pattern = ".".join((*parts[:2], "{i}", *parts[3:])) if layer else meta.name
        if pattern not in rules or (module and int(layer) and not _counts(rules[pattern])):
            raise ValueError(f"model_type {family.model_type} cannot have {meta.name}")
        rule = rules[pattern]
        layout = _layout(rule, family).of_layer(int(layer or 0))
        own = config.of_layer(int(layer) + (config.num_layers if module else 0)) if layer else config
        found.append(Placement(meta, tuple(_names(rule, layer, config)), layout, own, state_dtype))
    return found


def _layout(rule: Rule, family: Family) -> Layout:
    if isinstance(rule.layout, str) and rule.layout not in LAYOUTS:
        known = f"known are {', '.join(LAYOUTS)}"
        raise ValueError(f"{family.file}: weights: {rule.ours}: unknown layout {rule.layout!r}; {known}")
    return LAYOUTS[rule.layout] if isinstance(rule.layout, str) else rule.layout


def copies(config: TransformerConfig, model_type: str) -> list[Placement]:
    """Return the copies of the embedding and the output head that Hugging Face files contain in multi-token prediction
    modules."""
    family = family_of({"model_type": model_type})
    originals = {each.meta.name: each for each in placements(config, model_type)} if config.mtp_depths else {}
    return [
        replace(originals.get(ours, originals[EMBEDDING]), theirs=(_numbered(name, str(depth), config),))
        for depth in range(config.mtp_depths)
        for name, ours in family.copies.items()
    ]


def multi_token_depths(tensors: Mapping[str, Sliceable], config: TransformerConfig, model_type: str) -> int:
    """Return the number of multi-token prediction depths for which `tensors` contains weights."""
    family = family_of({"model_type": model_type})
    names = [rule.theirs[0] for rule in family.multi_token if rule.ours.endswith(".eh_proj.weight")]
    found = {_numbered(name, str(depth), config) for name in names for depth in range(len(tensors))}
    return len(found & tensors.keys())


def _counts(rule: Rule) -> bool:
    """Return True if the Hugging Face names in a rule contain a placeholder for the module number."""
    return any(mark in name for name in rule.theirs for mark in ("{i}", "{n}"))


def _with_depths(config: TransformerConfig, depths: int) -> TransformerConfig:
    return replace(config, mtp_num_layers=depths or None)


def _numbered(name: str, number: str, config: TransformerConfig) -> str:
    """Replace the placeholders in a Hugging Face name with the number of a layer or a multi-token prediction module."""
    half, rest = divmod(int(number or 0), 2)
    name = name.replace("{i}", number).replace("{i/2}", str(half)).replace("{i%2}", str(rest))
    return name.replace("{n}", str(config.num_layers + int(number or 0)))


def _checkpoint_names(tensors: Mapping[str, Sliceable], family: Family) -> dict[str, Sliceable]:
    """Return the tensors under their usual names, which begin with the family's prefix. Tensors that are not weights
    are omitted."""
    for other, usual in family.renamed.items():
        tensors = {name.replace(other, usual): tensor for name, tensor in tensors.items()}
    bare = not any(name.startswith(family.prefix) for name in tensors)
    return {
        family.prefix + name if bare and name != _head(family) else name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(tuple(family.ignored)) and not name.startswith(tuple(family.left_out))
    }


def _too_few(tensors: Mapping[str, Sliceable], config: TransformerConfig, family: Family) -> list[str]:
    """Return an error message if the files contain fewer tensors than config.json has layers or experts. Without this
    check, a wrong number of layers or experts in config.json could cause huge allocations."""
    counts = {"num_layers": config.num_layers}
    if any("{e}" in name for rule in family.rules for name in rule.theirs):
        counts["num_experts"] = config.num_experts or 0
    theirs = {ours: key for key, ours in family.keys.items()}
    return [
        f"config.json has {theirs.get(ours, ours)} = {count}, but there are only {len(tensors)} tensors"
        for ours, count in counts.items()
        if count > len(tensors)
    ]


def _names(rule: Rule, layer: str, config: TransformerConfig) -> Iterator[str]:
    """Insert the layer number, and the number of each expert, into the Hugging Face names of a rule."""
    names = [_numbered(name, layer, config) for name in rule.theirs]
    if any("{e}" in name for name in names):
        return (name.replace("{e}", str(expert)) for expert in range(config.num_experts or 0) for name in names)
    return iter(names)


# MXFP4, the format of gpt-oss, is read as bf16, which represents all of its values exactly. 32 values along a matrix's
# last dim form a block. Each byte contains two 4-bit floats (E2M1), the first one in the lower half. The scale of a
# block is a power of two, whose exponent is stored with a bias of 127 (Open Compute Project, Microscaling Formats 1.0,
# sections 5.3 and 6.3).

POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of 4-bit floats, indexed by the lower three bits. The highest of the four bits is the sign."""

BLOCK = 32
"""Number of values in an MXFP4 block. All values in a block have the same scale, a power of two."""

BLOCKS, SCALES = "_blocks", "_scales"
"""Suffixes of the names of the two parts of an MXFP4 tensor."""


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize an MXFP4 tensor. blocks: [..., n, 16] in uint8. scales: [..., n] in uint8. Returns [..., 32 * n] in
    bf16."""
    values = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)])
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(values[pairs.int()], scales.int()[..., None] - 127).flatten(-2).bfloat16()


class Mxfp4Experts:
    """Expert matrices [E, in, out] in MXFP4, stored as blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""

    dtype = torch.bfloat16

    def __init__(self, blocks: Sliceable, scales: Sliceable) -> None:
        self.blocks, self.scales = blocks, scales

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dequantized tensor. Raises ValueError if the blocks and the scales do not match."""
        experts, out, count, half = (*self.blocks.shape, 0, 0, 0, 0)[:4]
        uint8 = self.blocks.dtype == self.scales.dtype == torch.uint8
        if tuple(self.scales.shape) != (experts, out, count) or 2 * half != BLOCK or not uint8:
            shapes = f"{list(self.blocks.shape)} and {list(self.scales.shape)}"
            raise ValueError(f"blocks and scales of shapes {shapes} are not MXFP4")
        return experts, count * BLOCK, out

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        slices = (*(box if isinstance(box, tuple) else (box,)), *(slice(None),) * 3)[:3]
        experts, within, out = (slice(*each.indices(n)) for each, n in zip(slices, self.shape, strict=True))
        first = within.start // BLOCK
        stored = experts, out, slice(first, -(-within.stop // BLOCK))
        found = dequantized(self.blocks[(*stored, slice(0, BLOCK // 2))], self.scales[stored])
        return found[..., within.start - first * BLOCK : within.stop - first * BLOCK].transpose(1, 2)


def with_mxfp4(tensors: Mapping[str, Sliceable]) -> dict[str, Sliceable]:
    """Return the tensors of a file, in which every MXFP4 tensor is dequantized. An MXFP4 tensor is stored as two
    tensors, blocks and scales. In the result, a single tensor replaces these two tensors."""
    pairs = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    whole = [name for name in pairs if name + SCALES in tensors]
    parts = {name + ending for name in whole for ending in (BLOCKS, SCALES)}
    found = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return found | {name: Mxfp4Experts(tensors[name + BLOCKS], tensors[name + SCALES]) for name in whole}
