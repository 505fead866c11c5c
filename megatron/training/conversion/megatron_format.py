"""Megatron-LM's torch_dist checkpoints as a source of conversions, optimizer state and position of the run included."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.folders import LATEST, METADATA
from megatron.core.dist_checkpointing.storage import Checkpoint, read_latest
from megatron.core.models.gpt.parameters import model_states, parameter_metas
from megatron.training.conversion.common_state import COMMON, args_of, load_pickle, update_count
from megatron.training.conversion.formats import Format, Options, Source, TrainingState
from megatron.training.conversion.hf_format import side_files_of
from megatron.training.conversion.megatron_args import config_of, progress_of
from megatron.training.conversion.megatron_names import Part, Place, find_places
from megatron.training.conversion.megatron_target import TorchDistTarget
from megatron.training.progress import Progress

STATE = "optimizer.state."
KINDS = {
    "main_param": ("fp32_param", "param"),
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
    "momentum_buffer": ("momentum_buffer",),
}
"""Our kinds of optimizer state -> theirs."""


def iteration_folder(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the latest of a folder."""
    text = (path / LATEST).read_text(errors="replace").strip() if (path / LATEST).is_file() else ""
    if text == "release":
        return path / text
    if text:
        return path / f"iter_{read_latest(path) or 0:07d}"
    return path


def of_megatron(path: Path) -> bool:
    """Whether a folder is a checkpoint of Megatron-LM, or holds some. Opening refuses those that are not torch_dist."""
    try:
        folder = iteration_folder(path)
        if any(folder.glob("mp_rank_*")) or (folder / COMMON).exists():
            return True
        return '"sharded_backend"' in (folder / METADATA).read_text(errors="replace")
    except (OSError, ValueError):
        return False


class TorchDistFolder:
    """Tensors of a torch_dist checkpoint by name, each in its own shape.

    Older versions stored optimizer states flattened: a tensor cut into a grid of blocks is kept as
    [grid..., elements of a block]. The index has the shape of the whole.
    """

    def __init__(self, folder: Path) -> None:
        backend = Checkpoint(folder)
        if (kind := backend.payload.get("sharded_backend")) != "torch_dist":
            raise ValueError(f"{folder} is a checkpoint of format {kind!r:.40}; only torch_dist can be read")
        flattened = getattr(backend.index, "mcore_data", None) or {}
        self.checkpoint = backend
        self.stored = {re.sub(r"^chained_\d+\.", "", key): key for key in backend.tensors}
        self.shapes = {name: backend.tensors[key].shape for name, key in self.stored.items()}
        self.whole: dict[str, tuple[int, ...]] = {}
        for name, key in self.stored.items():
            shape = (flattened.get(key) or {}).get("nd_reformulated_orig_global_shape")
            if shape is not None:
                self.whole[name] = self._unflattened(name, tuple(int(size) for size in shape))
                self.shapes[name] = self.whole[name]

    def _unflattened(self, name: str, whole: tuple[int, ...]) -> tuple[int, ...]:
        *grid, block = self.shapes[name]
        fits = len(grid) == len(whole) and all(g and w % g == 0 for g, w in zip(grid, whole, strict=True))
        if not fits or prod(whole) != prod(grid) * block:
            raise ValueError(f"{name}: blocks {list(self.shapes[name])} do not make {list(whole)}")
        return whole

    def dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.tensors[self.stored[name]].dtype

    def read(self, part: Part, prefix: str = "") -> Tensor:
        """A tensor, or one entry of it along the first dim."""
        name = prefix + part.key
        key, whole = self.stored[name], self.whole.get(name)
        if whole is None:
            return self.checkpoint.read(key, part.layer)
        *grid, _ = self.checkpoint.tensors[key].shape
        if part.layer is not None and grid[0] == whole[0]:
            return _from_blocks(self.checkpoint.read(key, part.layer)[None], [1, *grid[1:]], (1, *whole[1:]))[0]
        tensor = _from_blocks(self.checkpoint.read(key), grid, whole)
        return tensor if part.layer is None else tensor[part.layer]


def _from_blocks(blocks: Tensor, grid: Sequence[int], whole: tuple[int, ...]) -> Tensor:
    """[grid..., elements of a block] -> whole"""
    sizes = [size // count for size, count in zip(whole, grid, strict=True)]
    order = [axis for dim in range(len(grid)) for axis in (dim, len(grid) + dim)]
    return blocks.reshape(*grid, *sizes).permute(order).reshape(whole)


class TorchDistSource(Source):
    """An opened torch_dist checkpoint. Names and shapes of all parameters are checked before one is read."""

    def __init__(self, path: Path, options: Options) -> None:
        self.folder = iteration_folder(path)
        if old := sorted(each.name for each in self.folder.glob("mp_rank_*")):
            raise ValueError(
                f"{self.folder} is a checkpoint of one file per rank ({old[0]}), which cannot be read; "
                "load it with Megatron-LM and save it with --ckpt-convert-format torch_dist"
            )
        self.common = load_pickle(self.folder / COMMON)
        self.tensors = TorchDistFolder(self.folder)
        self.args = args_of(self.common, self.folder / COMMON)
        try:
            self.config = config_of(self.args, padding_counts=not options.weights_only)
            model = self.config.model
            self.metas = {meta.name: meta for meta in parameter_metas(model)}
            states = {meta.name: meta for meta, _ in model_states(model)}
            shapes = {k: shape for k, shape in self.tensors.shapes.items() if not k.startswith("optimizer.")}
            found = {k: meta for k, meta in states.items() if _has(k, shapes)}
            self.places = find_places(self.metas | found, shapes, model.num_layers)
        except (ValueError, AssertionError, ZeroDivisionError) as error:
            raise ValueError(f"{self.folder}: {str(error) or type(error).__name__}") from None
        self.states = list(found)
        if not options.weights_only and self.args.get("vocab_size") not in (None, model.vocab_size):
            self.notes = (
                f"the vocabulary is {model.vocab_size} tokens, with padding, which Megatron-LM's loss includes; "
                f"--weights-only takes {self.args['vocab_size']}",
            )
        self.side_files = side_files_of(self.config.tokenizer)

    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        return wanted or self.tensors.dtype(self.places[name].parts[0].key)

    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        return self._read(self.places[name], "").to(self.dtype(name, wanted))

    def _read(self, place: Place, prefix: str) -> Tensor:
        parts = [self.tensors.read(part, prefix) for part in place.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        return whole.reshape(place.meta.global_shape)

    def check_data(self) -> None:
        """Nothing: a checkpoint of Megatron-LM has no checksums."""

    def training(self) -> TrainingState | None:
        """Optimizer states by parameter. Bucket by bucket they cannot be read: they depend on the run's layout."""
        optimizer = self.common.get("optimizer")
        names = [name for name in self.tensors.shapes if name.startswith("optimizer.")]
        if optimizer is None and not names:
            return None
        remedy = "convert the weights alone with --weights-only"
        prefixes: dict[str, str] = {}
        for kind, theirs in KINDS.items():
            found = [f"{STATE}{their}." for their in theirs if any(n.startswith(f"{STATE}{their}.") for n in names)]
            if found:
                prefixes[kind] = found[0]
        if "exp_avg" not in prefixes and "momentum_buffer" not in prefixes:
            sharding = _sharding(self.common) or "an unknown format"
            raise ValueError(
                f"{self.folder}: its optimizer state is in {sharding}, which depends on the layout; {remedy}"
            )
        if not (self.config.parallel.fp16 or self.config.parallel.bf16):
            prefixes.pop("main_param", None)
        self._check_states(prefixes)
        try:
            count = update_count(optimizer)
            progress = Progress(**progress_of(self.common, self.args))
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}; {remedy}") from None
        if count is None:
            raise ValueError(f"{self.folder} does not tell the optimizer's number of updates; {remedy}")

        def read(kind: str, name: str) -> Tensor:
            return self._read(self.places[name], prefixes[kind]).to(torch.float32)

        return TrainingState(progress, count, tuple(prefixes), read, lambda kind, name: torch.float32)

    def _check_states(self, prefixes: dict[str, str]) -> None:
        for kind, prefix in prefixes.items():
            for name in self.metas:
                for part in self.places[name].parts:
                    shape, expected = self.tensors.shapes.get(prefix + part.key), self.tensors.shapes[part.key]
                    if shape != expected:
                        what = "is missing" if shape is None else f"has shape {list(shape)}, not {list(expected)}"
                        raise ValueError(f"{self.folder}: {kind} of {name}: {prefix}{part.key} {what}")


def _has(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a state of ours is in the checkpoint: under its own name, or stacked with those of other layers."""
    return name in shapes or re.sub(r"layers\.\d+\.", "layers.", name) in shapes


def _sharding(common: dict[str, Any]) -> str | None:
    """The name of the format of the optimizer's state."""
    content = common.get("content_metadata")
    found = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    optimizer = common.get("optimizer")
    states = optimizer.values() if isinstance(optimizer, dict) else ()
    kinds = [each.get("param_state_sharding_type") for each in (optimizer, *states) if isinstance(each, dict)]
    return next((kind for kind in (*kinds, found) if isinstance(kind, str)), None)


MEGATRON_FORMAT = Format("megatron", of_megatron, TorchDistSource, TorchDistTarget)
