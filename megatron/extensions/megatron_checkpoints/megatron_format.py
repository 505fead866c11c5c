"""Megatron-LM's checkpoints as a source of conversions, optimizer state and position of the run included."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.models.gpt.parameters import model_states, parameter_metas
from megatron.extensions.conversion.formats import Format, Options, Source, TrainingState, side_files_of
from megatron.extensions.megatron_checkpoints.common_state import args_of, load_pickle, loss_scaler_of, update_count
from megatron.extensions.megatron_checkpoints.flags import COMMON, iteration_folder
from megatron.extensions.megatron_checkpoints.legacy_folder import LegacyTensors
from megatron.extensions.megatron_checkpoints.legacy_states import FROZEN
from megatron.extensions.megatron_checkpoints.megatron_args import config_of, progress_of
from megatron.extensions.megatron_checkpoints.megatron_names import Part, find_places
from megatron.extensions.megatron_checkpoints.megatron_target import TorchDistTarget
from megatron.training.progress import Progress

STATE = "optimizer.state."
KINDS = {
    "main_param": ("fp32_param", "param"),
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
    "momentum_buffer": ("momentum_buffer",),
}
"""Our kinds of optimizer state -> theirs."""


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


class TorchDistTensors:
    """Our parameters in a torch_dist checkpoint: `Tensors` of a `MegatronSource`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arguments_file = folder / COMMON
        self.common: Mapping[str, Any] = load_pickle(self.arguments_file)
        self.tensors = TorchDistFolder(folder)
        shapes = self.tensors.shapes.values()
        self.sizes: Sequence[int] = [len(shapes), *(size for shape in shapes for size in shape[:2])]
        self.prefixes: dict[str, str] = {}

    def find(self, model: TransformerConfig) -> list[str]:
        metas = {meta.name: meta for meta in parameter_metas(model)}
        states = {meta.name: meta for meta, _ in model_states(model)}
        shapes = {k: shape for k, shape in self.tensors.shapes.items() if not k.startswith("optimizer.")}
        found = {k: meta for k, meta in states.items() if _has(k, shapes)}
        self.places = find_places(metas | found, shapes, model.num_layers)
        return list(found)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors.dtype(self.places[name].parts[0].key)

    def read(self, name: str, kind: str | None = None) -> Tensor:
        place, prefix = self.places[name], "" if kind is None else self.prefixes[kind]
        parts = [self.tensors.read(part, prefix) for part in place.parts]
        whole = parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
        return whole.reshape(place.meta.global_shape)

    def find_states(self, names: Collection[str]) -> tuple[str, ...]:
        """Bucket by bucket they cannot be read: they depend on the run's layout."""
        stored = [name for name in self.tensors.shapes if name.startswith("optimizer.")]
        if self.common.get("optimizer") is None and not stored:
            return ()
        for kind, theirs in KINDS.items():
            found = [f"{STATE}{their}." for their in theirs if any(n.startswith(f"{STATE}{their}.") for n in stored)]
            if found:
                self.prefixes[kind] = found[0]
        if "exp_avg" not in self.prefixes and "momentum_buffer" not in self.prefixes:
            sharding = _sharding(self.common) or "an unknown format"
            raise ValueError(f"its optimizer state is in {sharding}, which depends on the layout")
        for kind, prefix in self.prefixes.items():
            for name in names:
                self._check_state(kind, prefix, name)
        return tuple(self.prefixes)

    def _check_state(self, kind: str, prefix: str, name: str) -> None:
        for part in self.places[name].parts:
            shape, expected = self.tensors.shapes.get(prefix + part.key), self.tensors.shapes[part.key]
            if shape != expected:
                what = "is missing" if shape is None else f"has shape {list(shape)}, not {list(expected)}"
                raise ValueError(f"{kind} of {name}: {prefix}{part.key} {what}{FROZEN if shape is None else ''}")

    def check_states(self) -> None:
        """Nothing: states have names."""


class Tensors(Protocol):
    """The tensors of a checkpoint under our names, whole and in our shapes. All methods raise ValueError."""

    common: Mapping[str, Any]
    """Everything of the checkpoint that is not a tensor."""

    arguments_file: Path
    sizes: Sequence[int]
    """No count among the arguments of a true checkpoint is larger than all of these."""

    def find(self, model: TransformerConfig) -> list[str]:
        """Looks up all parameters of a model, and checks that shapes fit and that nothing else is there. Returns the
        names of what the model keeps beside parameters and the checkpoint has."""

    def dtype(self, name: str) -> torch.dtype: ...

    def read(self, name: str, kind: str | None = None) -> Tensor:
        """A parameter, or the optimizer's state of it of a kind."""

    def find_states(self, names: Collection[str]) -> tuple[str, ...]:
        """Looks up the optimizer's states of these parameters, and returns their kinds; none if it has no states."""

    def check_states(self) -> None:
        """Checks what can be seen only by reading states."""


class MegatronSource(Source):
    """An opened checkpoint of Megatron-LM. Names and shapes of all parameters are checked before one is read."""

    def __init__(self, path: Path, options: Options) -> None:
        self.folder = iteration_folder(path)
        legacy = any(self.folder.glob("mp_rank_*"))
        kind: type[LegacyTensors] | type[TorchDistTensors] = LegacyTensors if legacy else TorchDistTensors
        self.tensors: Tensors = kind(self.folder)
        self.args = args_of(self.tensors.common, self.tensors.arguments_file)
        try:
            self.config = config_of(self.args, padding_counts=not options.weights_only)
            model = self.config.model
            for name, count in (("num_layers", model.num_layers), ("num_experts", model.num_experts or 0)):
                if count > max(self.tensors.sizes, default=0):
                    raise ValueError(f"its arguments say {name} {count}, and no tensor is that large")
            self.metas = {meta.name: meta for meta in parameter_metas(model)}
            self.states = self.tensors.find(model)
        except (ValueError, AssertionError, ZeroDivisionError) as error:
            raise ValueError(f"{self.folder}: {str(error) or type(error).__name__}") from None
        self.checks_states = False
        self.notes = tuple(self._remarks(options))
        self.side_files = side_files_of(self.config.tokenizer)

    def _remarks(self, options: Options) -> Iterator[str]:
        tokens = self.config.model.vocab_size
        if not options.weights_only and self.args.get("vocab_size") not in (None, tokens):
            yield (
                f"the vocabulary is {tokens} tokens, with padding, which Megatron-LM's loss includes; "
                f"--weights-only takes {self.args['vocab_size']}"
            )
        if self.args.get("fp8"):
            yield f"histories of fp8 scaling are not carried; continue with --fp8-format {self.args['fp8']}"
        if not options.weights_only and not self.tensors.common.get("optimizer"):
            yield "it has no optimizer state, so that a run starts at iteration 0"

    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        return wanted or self.tensors.dtype(name)

    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        return self.tensors.read(name).to(self.dtype(name, wanted))

    def check_data(self) -> None:
        """Checks which state belongs to which parameter; a checkpoint of Megatron-LM has no checksums."""
        if self.checks_states:
            self.tensors.check_states()

    def training(self) -> TrainingState | None:
        remedy = "convert the weights alone with --weights-only"
        try:
            kinds = self.tensors.find_states(self.metas)
            if not kinds:
                return None
            count = update_count(self.tensors.common.get("optimizer"))
            progress = Progress(**progress_of(self.tensors.common, self.args))
            if "exp_avg" not in kinds:
                count = progress.iteration  # which only Adam's bias correction depends on
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}; {remedy}") from None
        if count is None:
            raise ValueError(f"{self.folder} does not tell the optimizer's number of updates; {remedy}")
        if not (self.config.parallel.fp16 or self.config.parallel.bf16):
            kinds = tuple(kind for kind in kinds if kind != "main_param")
        self.checks_states = True

        def read(kind: str, name: str) -> Tensor:
            return self.tensors.read(name, kind).to(torch.float32)

        replicas = self.args.get("data_parallel_size")
        samples = (self.config.training.global_batch_size or 1) // (replicas if isinstance(replicas, int) else 1)
        scaler = loss_scaler_of(self.tensors.common.get("optimizer"), max(1, samples))
        return TrainingState(progress, count, kinds, read, lambda kind, name: torch.float32, scaler)


def _has(name: str, shapes: dict[str, tuple[int, ...]]) -> bool:
    """Whether a state of ours is in the checkpoint: under its own name, or stacked with those of other layers."""
    return name in shapes or re.sub(r"layers\.\d+\.", "layers.", name) in shapes


def _sharding(common: Mapping[str, Any]) -> str | None:
    """The name of the format of the optimizer's state."""
    content = common.get("content_metadata")
    found = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    optimizer = common.get("optimizer")
    states = optimizer.values() if isinstance(optimizer, dict) else ()
    kinds = [each.get("param_state_sharding_type") for each in (optimizer, *states) if isinstance(each, dict)]
    return next((kind for kind in (*kinds, found) if isinstance(kind, str)), None)


MEGATRON_FORMAT = Format("megatron", MegatronSource, TorchDistTarget)
