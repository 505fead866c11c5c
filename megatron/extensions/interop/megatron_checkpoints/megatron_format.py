"""Conversion source for Megatron-LM's checkpoints, including optimizer state and training progress."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.config.model import TransformerConfig
from megatron.core.dist_checkpointing.dcp_index import RENAMED
from megatron.core.dist_checkpointing.storage import Checkpoint
from megatron.core.pipeline_parallel.stage_parameters import model_states, stage_metas
from megatron.extensions.interop.conversion.formats import Options, Source, TrainingState, side_files_of
from megatron.extensions.interop.megatron_checkpoints.common_state import (
    args_of,
    load_common,
    loss_scaler_of,
    update_count,
)
from megatron.extensions.interop.megatron_checkpoints.flags import COMMON, iteration_folder
from megatron.extensions.interop.megatron_checkpoints.legacy_folder import LegacyTensors
from megatron.extensions.interop.megatron_checkpoints.legacy_states import FROZEN
from megatron.extensions.interop.megatron_checkpoints.megatron_args import (
    OTHER_FORMULAS,
    config_of,
    progress_of,
    unequal_parts,
)
from megatron.extensions.interop.megatron_checkpoints.megatron_names import (
    Names,
    find_ways,
    stacked_misfits,
    their_states,
    with_rows,
)

# Index files contain objects of the classes MCoreMetadata and MCoreSavePlan, which are read as the torch classes.
for _name, _module in (("Metadata", "metadata"), ("SavePlan", "planner")):
    theirs = "megatron.core.dist_checkpointing.strategies.torch", f"MCore{_name}"
    RENAMED[theirs] = f"torch.distributed.checkpoint.{_module}", _name

STATE = "optimizer.state."
KINDS = {
    "main_param": ("fp32_param", "param"),
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("exp_avg_sq",),
    "momentum_buffer": ("momentum_buffer",),
}
"""Maps this program's names of optimizer states to Megatron-LM's names of the same states."""


def _unflattened(name: str, stored: Sequence[int], whole: tuple[int, ...]) -> tuple[int, ...]:
    """Return `whole`, the original shape of a tensor that is stored in blocks. `stored` contains the number of blocks
    along each dim, followed by the number of elements of a block. Raises ValueError if these blocks cannot form a
    tensor of shape `whole`."""
    *grid, block = stored
    fits = len(grid) == len(whole) and all(g and w % g == 0 for g, w in zip(grid, whole, strict=True))
    if not fits or prod(whole) != prod(grid) * block:
        raise ValueError(f"{name}: blocks {list(stored)} do not form a tensor of shape {list(whole)}")
    return whole


def _from_blocks(blocks: Tensor, grid: Sequence[int], whole: tuple[int, ...]) -> Tensor:
    """Assemble a tensor of shape `whole` from blocks [grid..., elements of a block]. `grid` is the number of blocks
    along each dim."""
    sizes = [size // count for size, count in zip(whole, grid, strict=True)]
    order = [axis for dim in range(len(grid)) for axis in (dim, len(grid) + dim)]
    return blocks.reshape(*grid, *sizes).permute(order).reshape(whole)


class TorchDistTensors:
    """Reader of a model's parameters from a torch_dist checkpoint. `MegatronSource` reads tensors through this class.

    Older versions of Megatron-LM flatten optimizer states: a tensor that is divided into a grid of blocks is stored as
    [grid..., elements of a block]. The checkpoint's index contains the original shapes of flattened tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.arguments_file = folder / COMMON
        self.common: Mapping[str, object] = load_common(self.arguments_file)
        self.checkpoint = Checkpoint(folder)
        if (kind := self.checkpoint.payload.get("sharded_backend")) != "torch_dist":
            raise ValueError(f"{folder} is a checkpoint of format {kind!r:.40}; only torch_dist can be read")
        flattened = getattr(self.checkpoint.index, "mcore_data", None) or {}
        tensors = self.checkpoint.tensors
        self.stored = {re.sub(r"^chained_\d+\.", "", key): key for key in tensors}
        self.shapes = {name: tensors[key].shape for name, key in self.stored.items()}
        self.whole: dict[str, tuple[int, ...]] = {}
        for name, key in self.stored.items():
            shape = (flattened.get(key) or {}).get("nd_reformulated_orig_global_shape")
            if shape is not None:
                self.whole[name] = _unflattened(name, self.shapes[name], tuple(int(size) for size in shape))
        self.shapes |= self.whole
        self.sizes: Sequence[int] = [len(self.shapes), *(n for shape in self.shapes.values() for n in shape[:2])]
        self.prefixes: dict[str, str] = {}

    def find(self, model: TransformerConfig) -> list[str]:
        states = {name: meta for name, (meta, _) in their_states(model).items()}
        shapes = {k: shape for k, shape in self.shapes.items() if not k.startswith("optimizer.")}
        self.metas = {meta.name: meta for meta in stage_metas(model)} | states
        misfits = partial(stacked_misfits, shapes, model.num_layers)
        names = Names(self.metas.values(), hybrid=model.stated_layers is not None)
        self.ways = find_ways(self.metas, names.ways, shapes, misfits, states)
        return [name for name in states if name in self.ways]

    def dtype(self, name: str) -> torch.dtype:
        return self.checkpoint.tensors[self.stored[self.ways[name].names[0]]].dtype

    def read(self, name: str, kind: str | None = None) -> Tensor:
        way, prefix = self.ways[name], "" if kind is None else self.prefixes[kind]
        parts = [self._read(prefix + key, way.layer) for key in way.names]
        return way.whole(parts, self.metas[name].global_shape)

    def _read(self, name: str, layer: int | None) -> Tensor:
        """Return a stored tensor. If the tensors of several layers are stacked, return only the entry of `layer`."""
        key, whole = self.stored[name], self.whole.get(name)
        if whole is None:
            return self.checkpoint.read(key, layer)
        *grid, _ = self.checkpoint.tensors[key].shape
        if layer is not None and grid[0] == whole[0]:
            return _from_blocks(self.checkpoint.read(key, layer)[None], [1, *grid[1:]], (1, *whole[1:]))[0]
        tensor = _from_blocks(self.checkpoint.read(key), grid, whole)
        return tensor if layer is None else tensor[layer]

    def find_states(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the kinds of optimizer state that the checkpoint contains. Raises ValueError if the states are stored
        in a format that depends on the run's parallel layout, such as one flat tensor per gradient bucket."""
        stored = [name for name in self.shapes if name.startswith("optimizer.")]
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
        for key in self.ways[name].names:
            shape, expected = self.shapes.get(prefix + key), self.shapes[key]
            if shape != expected:
                what = "is missing" if shape is None else f"has shape {list(shape)}, not {list(expected)}"
                raise ValueError(f"{kind} of {name}: {prefix}{key} {what}{FROZEN if shape is None else ''}")

    def check_states(self) -> None:
        """Do nothing. torch_dist checkpoints store optimizer states by name, so the states cannot be in the wrong
        order."""


class MegatronSource(Source):
    """Conversion source that reads a Megatron-LM checkpoint. Names and shapes of all parameters are checked
    before any parameter is read.

    `tensors` reads the files. Its `find` locates all parameters, and `find_states` and `check_states` locate and check
    the optimizer states. `read` returns an unsharded parameter or state in this program's shape. `common` is the
    non-tensor content of the checkpoint. `sizes` contains the number of tensors and the sizes of their dims. A
    checkpoint is refused if its arguments declare more layers or experts than the largest number in `sizes`.
    """

    def __init__(self, path: Path, options: Options) -> None:
        self.folder = iteration_folder(path)
        legacy = any(self.folder.glob("mp_rank_*"))
        self.tensors = LegacyTensors(self.folder) if legacy else TorchDistTensors(self.folder)
        self.args = args_of(self.tensors.common, self.tensors.arguments_file)
        try:
            self.config = config_of(self.args, padding_counts=not options.weights_only)
            model = self.config.model
            for name, count in (("num_layers", model.num_layers), ("num_experts", model.num_experts or 0)):
                if count > max(self.tensors.sizes, default=0):
                    raise ValueError(f"its arguments have {name} {count}, but no tensor is that large")
            if parts := unequal_parts(self.config):
                raise ValueError(f"its model cannot be expressed: {'; '.join(parts)}")
            self.metas = {meta.name: meta for meta in stage_metas(model)}
            self.states = self.tensors.find(model)
            self.rows = {meta.name: meta.global_shape[0] for meta, _ in model_states(model)}
        except (ValueError, AssertionError, ZeroDivisionError) as error:
            raise ValueError(f"{self.folder}: {str(error) or type(error).__name__}") from None
        self.checks_states = False
        self.notes = tuple(self._remarks(options))
        self.side_files = side_files_of(self.config.tokenizer)
        # The checkpoint may not record the run's progress.
        with suppress(ValueError):
            progress = progress_of(self.tensors.common, self.args)
            # Release checkpoints have iteration 0, which is not a run's progress.
            self.progress = progress if progress.iteration else None

    def _remarks(self, options: Options) -> Iterator[str]:
        tokens = self.config.model.vocab_size
        if not options.weights_only and self.args.get("vocab_size") not in (None, tokens):
            yield (
                f"the vocabulary has {tokens} tokens, including padding, because Megatron-LM's loss includes it; "
                f"with --weights-only, it has {self.args['vocab_size']}"
            )
        if self.args.get("fp8"):
            yield f"fp8 scaling histories are not converted; continue with --fp8-format {self.args['fp8']}"
        if self.config.model.residual == "mhc":
            yield OTHER_FORMULAS
        if not options.weights_only and not self.tensors.common.get("optimizer"):
            yield "it has no optimizer state, so a run starts at iteration 0"

    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        return wanted or self.tensors.dtype(name)

    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        tensor = self.tensors.read(name)
        return with_rows(tensor, self.rows.get(name, len(tensor))).to(self.dtype(name, wanted))

    def check_data(self) -> None:
        """Check that the optimizer states are assigned to the correct parameters. Megatron-LM checkpoints contain no
        checksums that could be verified."""
        if self.checks_states:
            self.tensors.check_states()

    def training(self) -> TrainingState | None:
        remedy = "convert only the weights with --weights-only"
        try:
            kinds = self.tensors.find_states(self.metas)
            if not kinds:
                return None
            count = update_count(self.tensors.common.get("optimizer"))
            progress = progress_of(self.tensors.common, self.args)
            if "exp_avg" not in kinds:
                # Without Adam, the number of updates may be approximate, because only Adam's bias correction depends on
                # it.
                count = progress.iteration
        except ValueError as error:
            raise ValueError(f"{self.folder}: {error}; {remedy}") from None
        if count is None:
            raise ValueError(f"{self.folder} does not record the optimizer's number of updates; {remedy}")
        if not (self.config.parallel.fp16 or self.config.parallel.bf16):
            kinds = tuple(kind for kind in kinds if kind != "main_param")
        self.checks_states = True

        def read(kind: str, name: str) -> Tensor:
            return self.tensors.read(name, kind).to(torch.float32)

        replicas = self.args.get("data_parallel_size")
        samples = (self.config.training.global_batch_size or 1) // (replicas if isinstance(replicas, int) else 1)
        scaler = loss_scaler_of(self.tensors.common.get("optimizer"), max(1, samples))
        return TrainingState(progress, count, kinds, read, lambda kind, name: torch.float32, scaler)


def _sharding(common: Mapping[str, object]) -> str | None:
    """Return the name of the optimizer state format, or None if the checkpoint does not record it."""
    content = common.get("content_metadata")
    found = content.get("distrib_optim_sharding_type") if isinstance(content, dict) else None
    optimizer = common.get("optimizer")
    states = optimizer.values() if isinstance(optimizer, dict) else ()
    kinds = [each.get("param_state_sharding_type") for each in (optimizer, *states) if isinstance(each, dict)]
    return next((kind for kind in (*kinds, found) if isinstance(kind, str)), None)
