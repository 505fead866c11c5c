"""Hugging Face model folders: config.json, and weights in one file or in shards with an index.

Folders may come from untrusted sources. Weights are read from safetensors files, or from .bin files with
`weights_only`. Pickle files other than these .bin files are never read. A weights index may name only files in the
model's folder. Every problem raises ValueError with a one-line message.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.pickle_errors import why_refused
from megatron.core.dist_checkpointing.torch_file import load_torch_file
from megatron.extensions.interop.hugging_face.flags import CONFIG
from megatron.extensions.interop.hugging_face.read_config import read_json, text_model
from megatron.extensions.interop.hugging_face.safetensors_file import Sliceable, TensorSpec, read_header

SAFE, SAFE_INDEX = "model.safetensors", "model.safetensors.index.json"
NAMED_WEIGHTS = "transformers_weights"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


class HFFolder:
    """Open model folder. `config` is the content of config.json, and `tensors` maps tensor names to weights on disk.

    For a multimodal model, `config` and `tensors` describe only the text model. Raises ValueError if the folder is
    invalid.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        whole = read_json(path / CONFIG)
        self.config, prefix = text_model(whole)
        found = _open_weights(path, whole.get(NAMED_WEIGHTS))
        self.tensors: dict[str, Sliceable] = {
            name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)
        }


def _open_weights(folder: Path, named: object) -> dict[str, Sliceable]:
    """Open the weights of a folder. If the folder contains weights in several formats, the order of precedence is the
    same as in transformers.

    `named` is the value of the key transformers_weights in config.json, or None if the key is missing. The key names a
    weights file or an index with a custom file name.
    """
    if named is not None:
        return _open_named(folder, named)
    for index, single, read in ((SAFE_INDEX, SAFE, read_header), (BIN_INDEX, BIN, _BinFiles().read)):
        # As in transformers, a single weights file takes precedence over an index.
        if (folder / single).is_file():
            return {**read(folder / single)}
        if (folder / index).is_file():
            return _open_shards(folder, index, read)
    raise ValueError(f"{folder} contains no weights: there is no {SAFE}, {SAFE_INDEX}, {BIN} or {BIN_INDEX}")


def _open_named(folder: Path, named: object) -> dict[str, Sliceable]:
    endings = (".safetensors", ".safetensors.index.json")
    if not isinstance(named, str) or not named.endswith(endings) or "\0" in named:
        rule = "must be the name of a file that ends in .safetensors or .safetensors.index.json"
        raise ValueError(f"{folder / CONFIG}: {NAMED_WEIGHTS} {str(named)[:80]!r} {rule}; correct or remove the key")
    root, place = (os.path.abspath(each) for each in (folder, folder / named))
    if os.path.commonpath([root, place]) != root:
        rule = "must name a file inside the folder"
        raise ValueError(f"{folder / CONFIG}: {NAMED_WEIGHTS} {named[:80]!r} {rule}; correct or remove the key")
    if not os.path.isfile(place):
        raise ValueError(f"{place} is missing; {NAMED_WEIGHTS} in config.json names it: correct or remove the key")
    if named.endswith(".index.json"):
        return _open_shards(folder, named, read_header)
    return {**read_header(Path(place))}


def _open_shards(folder: Path, index: str, read: Callable[[Path], Mapping[str, Sliceable]]) -> dict[str, Sliceable]:
    places = read_json(folder / index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / index} has no weight_map from tensor names to file names")
    found: dict[str, Sliceable] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file or file in (".", ".."):
            raise ValueError(f"{folder / index} names {file!r}, which is not a file of this folder")
        if not (folder / file).is_file():
            raise ValueError(f"{folder / file} is missing; {index} names it")
        tensors = read(folder / file)
        listed = {name for name, place in places.items() if place == file}
        for names, what in ((listed - tensors.keys(), "lacks"), (tensors.keys() - listed, "also contains")):
            if names:
                raise ValueError(f"{folder / file} {what} {min(names)}, which contradicts {index}")
        found |= tensors
    return found


# Files in .bin format.


class _BinFiles:
    """Files that torch.save wrote. The files are loaded with `weights_only`, and are memory-mapped if possible. Only
    one file is open at a time."""

    def __init__(self) -> None:
        self._open: tuple[Path, dict[str, Tensor]] | None = None

    def read(self, path: Path) -> dict[str, _BinTensor]:
        """Return the tensors of a .bin file. Raises ValueError if the file contains anything besides tensors."""
        tensors = self.tensors(path)
        return {name: _BinTensor(tuple(value.shape), value.dtype, self, path, name) for name, value in tensors.items()}

    def tensors(self, path: Path) -> dict[str, Tensor]:
        if self._open is None or self._open[0] != path:
            self._open = None
            self._open = (path, _load_bin(path))
        return self._open[1]


@dataclass(frozen=True)
class _BinTensor(TensorSpec):
    files: _BinFiles
    path: Path
    name: str

    def __getitem__(self, box: tuple[slice, ...]) -> Tensor:
        return self.files.tensors(self.path)[self.name][box].clone()


def _load_bin(path: Path) -> dict[str, Tensor]:
    try:
        found = load_torch_file(path)
    except Exception as error:
        # A damaged or malicious file can cause any exception.
        raise ValueError(f"{path} is refused, because it is not a plain tensor file: {why_refused(error)}") from None
    if not isinstance(found, dict) or not all(
        isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized
        for value in found.values()
    ):
        raise ValueError(f"{path} must contain a dict of names and tensors, and nothing else")
    return found


# Writing.


def plan_shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> dict[str, dict[str, TensorSpec]]:
    """Assign tensors, in order, to files of at most `max_bytes`. A tensor larger than `max_bytes` is stored in a
    separate file."""
    shards: list[dict[str, TensorSpec]] = [{}]
    size = 0
    for name, spec in specs.items():
        if shards[-1] and size + spec.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = spec
        size += spec.nbytes
    if len(shards) == 1:
        return {SAFE: shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def index_of(shards: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, object]:
    """Return the content of model.safetensors.index.json."""
    total = sum(spec.nbytes for shard in shards.values() for spec in shard.values())
    weight_map = {name: file for file, shard in shards.items() for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": weight_map}
