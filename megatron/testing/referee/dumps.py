"""Convert gradients that another program wrote to gradients of this program's parameters.

To convert a weight, this program moves the elements of the other program's tensors t to their places in its weight w. A
factor or an offset may be applied too, for example if a norm stores w - 1. As a formula, w = A t + b. A gradient is
converted in the same way, but without the offset b and with the inverse factor. To find the offset and the factor, this
module converts a tensor of zeros and a tensor of ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.dcp_index import MALFORMED, IndexReader
from megatron.core.dist_checkpointing.path_kind import METADATA
from megatron.core.param_meta import ParamMeta
from megatron.extensions.interop.conversion.convert import recognize
from megatron.extensions.interop.conversion.formats import Options, Source, few
from megatron.extensions.interop.hugging_face.flags import CONFIG
from megatron.extensions.interop.hugging_face.folder import HFFolder
from megatron.extensions.interop.hugging_face.safetensors_file import Sliceable, read_header
from megatron.extensions.interop.hugging_face.weights import HFWeights, placements
from megatron.extensions.interop.megatron_checkpoints.gradient_folder import RANK_FILES, GradientFolder
from megatron.extensions.observe.diagnosis.gradient_dump import GRADIENTS, assembled, read_box

INDEX = ".metadata"
"""Name of the metadata file in a folder that torch.distributed.checkpoint (DCP) has written."""

REMEDY = (
    "give gradients under the parameter names of --model: a .safetensors file, or a folder written by "
    "torch.distributed.checkpoint, by save_pretrained, or by Megatron-LM (wgrads/iter_XXXXXXX)"
)


class Dump:
    """Gradients in a dump, keyed by this program's parameter names. Each gradient is read from the dump on demand."""

    def __init__(self, names: Mapping[str, Callable[[], Tensor]], dtype: torch.dtype) -> None:
        self._names, self.dtype = names, dtype

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def read(self, name: str) -> Tensor:
        """Return the whole gradient of the parameter `name` in fp64."""
        return self._names[name]()


def open_dump(path: Path, model: Source, flag: str = "--gradients") -> Dump:
    """Open gradients that another program has written. `path` is the value of `flag`. `path` may be a `.safetensors`
    file, or a folder written by torch.distributed.checkpoint, with parameter names of this program or of transformers.
    Other possible paths are a checkpoint that contains gradients in place of weights, and a folder written with
    --save-wgrads-interval. Raises ValueError for names and shapes that do not fit the model.
    """
    try:
        dump = _opened(path, model)
        if not any(name in dump for name in model.metas):
            raise ValueError("it contains no complete gradient of any parameter of the model")
        if not dump.dtype.is_floating_point:
            raise ValueError(f"it holds {dump.dtype} tensors, which are not gradients")
    except (OSError, ValueError) as error:
        text = str(error) if path.exists() else f"{path} does not exist"
        named = text if text.startswith(str(path)) else f"{path}: {text}"
        raise ValueError(f"{flag} {named}; {REMEDY}") from None
    return dump


def _opened(path: Path, model: Source) -> Dump:
    if not path.is_dir():
        return _by_name(dict(read_header(path)), model)
    if files := sorted(path.glob(GRADIENTS)):
        return _of_step(path, files, model)
    if list(path.glob(RANK_FILES)):
        ranks = GradientFolder(path, model.config.model)
        trained = [name for name in ranks.metas if name not in ranks.buffers]
        return Dump({name: partial(_fp64, ranks, name) for name in trained}, ranks.dtype(trained[0]))
    if (path / CONFIG).is_file():
        return _of_transformers(HFFolder(path).tensors, model)
    if (path / INDEX).is_file() and not (path / METADATA).is_file():
        return _by_name(dict(_stored(path)), model)
    try:
        kind = recognize(path)
    except ValueError:
        found = ", ".join(sorted(each.name for each in path.iterdir())[:4]) or "nothing"
        raise ValueError(f"it is a folder in no known format, and holds {found}") from None
    source = kind.open(path, Options())
    if different := sorted(
        name for name, meta in model.metas.items() if _shape(source.metas.get(name)) != _shape(meta)
    ):
        shapes = f"{_shape(source.metas.get(different[0]))} instead of {_shape(model.metas[different[0]])}"
        raise ValueError(f"it belongs to another model: {len(different)} parameters differ ({different[0]}: {shapes})")
    dtype = source.dtype(next(iter(source.metas)), None)
    return Dump({name: partial(source.read, name, torch.float64) for name in source.metas}, dtype)


@dataclass(frozen=True)
class StoredTensor:
    """Tensor in a folder that torch.distributed.checkpoint has written. The tensor is read when it is sliced."""

    reader: IndexReader
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, box: tuple[slice, ...], /) -> Tensor:
        """Read the whole tensor, and return the slice `box`."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        dcp.load({self.key: tensor}, storage_reader=self.reader, planner=planner, no_dist=True)
        return tensor[box]


def _stored(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Yield (name, tensor) for each tensor in a folder that torch.distributed.checkpoint.save has written."""
    reader = IndexReader(folder)
    try:
        entries = reader.read_metadata().state_dict_metadata.items()
    except (OSError, *MALFORMED) as error:
        raise ValueError(f"{INDEX} cannot be read: {type(error).__name__}: {error}") from None
    for key, entry in entries:
        if isinstance(entry, TensorStorageMetadata):
            yield key, StoredTensor(reader, key, tuple(entry.size), entry.properties.dtype)


def _by_name(tensors: Mapping[str, Sliceable], model: Source) -> Dump:
    """Read gradients under the parameter names of this program or of transformers."""
    known = tensors.keys() & model.metas.keys()
    if not known:
        return _of_transformers(tensors, model)
    found = {name: tensors[name] for name in sorted(known)}
    _check_shapes(found, {name: model.metas[name].global_shape for name in known})
    return Dump({name: partial(_whole, tensor) for name, tensor in found.items()}, next(iter(found.values())).dtype)


def _of_transformers(tensors: Mapping[str, Sliceable], model: Source) -> Dump:
    """Read gradients of a transformers model. A parameter is omitted if one of its tensors is missing."""
    if not tensors:
        raise ValueError("it holds no tensors")
    family = model.origin.model_type
    if family is None:
        _refuse_names(sorted(tensors), list(model.metas), "this model, which belongs to no Hugging Face family")
    config: TransformerConfig = model.config.model
    placed = {each.meta.name: each for each in placements(config, family)}
    zeros: dict[str, Tensor] = {}
    for each in placed.values():
        shapes = each.to_theirs(torch.empty(each.meta.global_shape, device="meta"))
        zeros |= {
            name: torch.zeros(shape.shape, dtype=torch.float64) for name, shape in zip(each.theirs, shapes, strict=True)
        }
    if unknown := sorted(tensors.keys() - zeros.keys()):
        _refuse_names(unknown, list(zeros), f"this {family} model")
    _check_shapes(tensors, {name: tuple(zeros[name].shape) for name in tensors})
    whole: dict[str, Sliceable] = {**zeros, **tensors}
    weights = HFWeights(whole, config, family)
    constant = HFWeights(zeros, config, family)
    factors = HFWeights({name: torch.ones_like(zero) for name, zero in zeros.items()}, config, family)

    def read(name: str) -> Tensor:
        given, offset, one = (each.read(name, dtype=torch.float64) for each in (weights, constant, factors))
        factor = one - offset
        return torch.where(factor == 0, 0, (given - offset) / torch.where(factor == 0, 1, factor) ** 2)

    complete = [name for name, each in placed.items() if all(part in tensors for part in each.theirs)]
    return Dump({name: partial(read, name) for name in complete}, next(iter(tensors.values())).dtype)


def _refuse_names(unknown: Sequence[str], known: Sequence[str], whose: str) -> NoReturn:
    """Raise ValueError for tensors that do not belong to any parameter."""
    found = ", ".join(unknown[:3]) + ", ..." * (len(unknown) > 3)
    raise ValueError(f"it holds {found}, and the parameters of {whose} are {', '.join(known[:3])}, ...")


def _check_shapes(tensors: Mapping[str, Sliceable], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError for gradients whose shapes differ from the parameters' shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [
        f"{name} has the shape {shape}, not {expected[name]}"
        for name, shape in shapes.items()
        if shape != expected[name]
    ]
    if wrong:
        raise ValueError(few(wrong, 2))


def _shape(meta: ParamMeta | None) -> tuple[int, ...] | None:
    return None if meta is None else meta.global_shape


def _of_step(folder: Path, files: Sequence[Path], model: Source) -> Dump:
    """Read the gradients that a run of this program wrote at one step with --save-wgrads-interval. Each rank has
    written its blocks of the gradients."""
    boxes: dict[str, list[tuple[tuple[int, ...], Sliceable]]] = {}
    for file in files:
        for key, tensor in read_header(file).items():
            name, offset = read_box(key)
            boxes.setdefault(name, []).append((offset, tensor))
    if unknown := sorted(boxes.keys() - model.metas.keys()):
        _refuse_names(unknown, list(model.metas), "this model")

    def read(name: str) -> Tensor:
        try:
            parts = [(offset, tensor[()].double()) for offset, tensor in boxes[name]]
            return assembled(model.metas[name].global_shape, parts)
        except ValueError as error:
            raise ValueError(
                f"{folder}: gradient of {name}: {error}; check that the files of all ranks are there"
            ) from None

    dtype = next(iter(boxes.values()))[0][1].dtype
    return Dump({name: partial(read, name) for name in boxes}, dtype)


def _fp64(ranks: GradientFolder, name: str) -> Tensor:
    return ranks.read(name).double()


def _whole(tensor: Sliceable) -> Tensor:
    return tensor[()].double()
