"""Reads gradients written by another program as gradients of this program's parameters.

A conversion reads one of our weights from theirs, w = A t + b, by moving elements, possibly with a factor or an offset
(a norm that stores w - 1). The gradient with respect to w is read in the same way, but without b and with the inverse
factor. Converting zeros and ones reveals both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.dcp_index import MALFORMED, IndexReader
from megatron.core.dist_checkpointing.path_kind import METADATA
from megatron.core.param_meta import ParamMeta
from megatron.extensions.interop.conversion.convert import Input
from megatron.extensions.interop.conversion.formats import Options, Source
from megatron.extensions.interop.hugging_face.flags import CONFIG
from megatron.extensions.interop.hugging_face.folder import HFFolder
from megatron.extensions.interop.hugging_face.safetensors_file import Sliceable, read_header
from megatron.extensions.interop.hugging_face.weights import HFWeights, placements
from megatron.extensions.interop.megatron_checkpoints.gradient_folder import GradientFolder
from megatron.extensions.observe.diagnosis.gradient_dump import GRADIENTS, assembled, read_box

INDEX = ".metadata"
"""File of a folder of torch's DCP."""


class Dump:
    """Gradients by this program's parameter names, read one at a time."""

    def __init__(self, names: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype) -> None:
        self._names, self.dtype = names, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str) -> Tensor:
        """Return a whole gradient in fp64."""
        return self._names[name]()


def open_dump(path: Path, model: Source) -> Dump:
    """Open gradients written by another program.

    `path` is a `.safetensors` file or a folder of torch's DCP, with names of this program or of transformers; a folder
    in a checkpoint format that contains gradients in place of weights; or a folder of --save-wgrads-interval. Raises
    ValueError for names and shapes that do not fit the model.
    """
    if path.is_dir() and (files := sorted(path.glob(GRADIENTS))):
        return _of_step(path, files, model)
    if path.is_dir() and list(path.glob("mp_rank_*")):
        ranks = GradientFolder(path, model.config.model)
        trained = [name for name in ranks.metas if name not in ranks.buffers]
        return Dump({name: partial(_fp64, ranks, name) for name in trained}, ranks.dtype(trained[0]))
    if path.is_dir() and (path / CONFIG).is_file():
        folder = HFFolder(path)
        return _of_transformers(path, folder.tensors, model, next(iter(folder.tensors.values())).dtype)
    if (path / INDEX).is_file() and not (path / METADATA).is_file():
        return _by_name(path, dict(_stored(path)), model)
    if path.is_dir():
        source = Input.at(path).open(Options())
        if different := {name for name, meta in model.metas.items() if _shape(source.metas.get(name)) != _shape(meta)}:
            raise ValueError(f"--gradients {path} is of another model: {', '.join(sorted(different)[:4])} differ")
        dtype = source.dtype(next(iter(source.metas)), None)
        return Dump({name: partial(source.read, name, torch.float64) for name in source.metas}, dtype)
    try:
        tensors: dict[str, Sliceable] = {**read_header(path)}
    except OSError as error:
        raise ValueError(f"--gradients {path} cannot be read: {error}") from None
    return _by_name(path, tensors, model)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a folder of torch's DCP."""

    reader: IndexReader
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, box: tuple[slice, ...], /) -> Tensor:
        """Read the whole tensor, and return a part of it."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load({self.key: tensor}, storage_reader=self.reader, planner=planner, no_dist=True)
        return tensor[box]


def _stored(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the tensors of a folder that torch.distributed.checkpoint.save has written, by name."""
    reader = IndexReader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata.items()
    except (OSError, *MALFORMED) as error:
        raise ValueError(f"--gradients {folder} cannot be read: {type(error).__name__}: {error}") from None
    for key, entry in entries:
        if isinstance(entry, TensorStorageMetadata):
            yield key, StoredTensor(reader, key, tuple(entry.size), entry.properties.dtype)


def _by_name(path: Path, tensors: Mapping[str, Sliceable], model: Source) -> Dump:
    """Read gradients with names of this program, or else of transformers."""
    if not tensors:
        raise ValueError(f"--gradients {path} holds no tensors")
    dtype = next(iter(tensors.values())).dtype
    if known := tensors.keys() & model.metas.keys():
        found = {name: tensors[name] for name in known}
        for name, tensor in found.items():
            if tuple(tensor.shape) != model.metas[name].global_shape:
                shapes = f"{tuple(tensor.shape)} instead of {model.metas[name].global_shape}"
                raise ValueError(f"--gradients {path}: {name} has shape {shapes}")
        return Dump({name: partial(_whole, tensor) for name, tensor in found.items()}, dtype)
    return _of_transformers(path, tensors, model, dtype)


def _of_transformers(path: Path, tensors: Mapping[str, Sliceable], model: Source, dtype: torch.dtype) -> Dump:
    """Read gradients of a transformers model. Parameters with a missing tensor are omitted."""
    family = model.origin.model_type
    if family is None:
        own = ", ".join(sorted(tensors)[:4])
        raise ValueError(f"--gradients {path}: {own} are no names of the model, which has no Hugging Face family")
    config: TransformerConfig = model.config.model
    placed = {each.meta.name: each for each in placements(config, family)}
    known = {name for each in placed.values() for name in each.theirs}
    if unknown := sorted(tensors.keys() - known):
        raise ValueError(f"--gradients {path}: {', '.join(unknown[:4])} are no names of {family}")
    zeros: dict[str, Tensor] = {}
    for each in placed.values():
        shapes = each.to_theirs(torch.empty(each.meta.global_shape, device="meta"))
        zeros |= {
            name: torch.zeros(shape.shape, dtype=torch.float64) for name, shape in zip(each.theirs, shapes, strict=True)
        }
    whole: dict[str, Sliceable] = {**zeros, **tensors}
    weights = HFWeights(whole, config, family)
    constant = HFWeights(zeros, config, family)
    factors = HFWeights({name: torch.ones_like(zero) for name, zero in zeros.items()}, config, family)

    def read(name: str) -> Tensor:
        given, offset, one = (each.read(name, dtype=torch.float64) for each in (weights, constant, factors))
        factor = one - offset
        return torch.where(factor == 0, 0, (given - offset) / torch.where(factor == 0, 1, factor) ** 2)

    complete = [name for name, each in placed.items() if all(part in tensors for part in each.theirs)]
    return Dump({name: partial(read, name) for name in complete}, dtype)


def _shape(meta: ParamMeta | None) -> tuple[int, ...] | None:
    return None if meta is None else meta.global_shape


def _of_step(folder: Path, files: Sequence[Path], model: Source) -> Dump:
    """Read the gradients that a run of this program dumped in a step, from the boxes of all ranks."""
    boxes: dict[str, list[tuple[tuple[int, ...], Sliceable]]] = {}
    for file in files:
        for key, tensor in read_header(file).items():
            name, offset = read_box(key)
            boxes.setdefault(name, []).append((offset, tensor))
    if unknown := sorted(boxes.keys() - model.metas.keys()):
        raise ValueError(f"{folder}: {', '.join(unknown[:4])} are no parameters of the model")

    def read(name: str) -> Tensor:
        try:
            parts = [(offset, tensor[()].double()) for offset, tensor in boxes[name]]
            return assembled(model.metas[name].global_shape, parts)
        except ValueError as error:
            raise ValueError(f"{folder}: gradient of {name}: {error}; is the file of each rank there?") from None

    dtype = next(iter(boxes.values()))[0][1].dtype
    return Dump({name: partial(read, name) for name in boxes}, dtype)


def _fp64(ranks: GradientFolder, name: str) -> Tensor:
    return ranks.read(name).double()


def _whole(tensor: Sliceable) -> Tensor:
    return tensor[()].double()
