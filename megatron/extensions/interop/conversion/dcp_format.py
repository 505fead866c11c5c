"""Conversion source and target for this program's checkpoint format."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing.path_kind import RUN_CONFIG
from megatron.core.dist_checkpointing.state_dict import CALLBACKS, MAIN_PARAM, StateDict, model_key, optimizer_key
from megatron.core.dist_checkpointing.storage import save
from megatron.core.parallel_dims import ParallelDims
from megatron.core.parallel_state import Axis
from megatron.core.pipeline_parallel.stage_parameters import model_states, stage_metas
from megatron.extensions.interop.conversion.formats import (
    Options,
    Origin,
    Source,
    Target,
    TrainingState,
    Written,
    side_files_of,
    tokenizer_config,
)
from megatron.extensions.interop.conversion.streaming import Made, StreamedTensor, StreamingWriter, share
from megatron.training.checkpoints.loading import (
    FORMAT_VERSION,
    choose_checkpoint,
    converted,
    saved_config,
    saved_progress,
)
from megatron.training.config.arguments import save_config
from megatron.training.config.flags import values_by_section
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.extensions import load_saved_extensions
from megatron.training.progress import Progress

TOKENIZER_FOLDER = "tokenizer"
STATE_KINDS = (MAIN_PARAM, "exp_avg", "exp_avg_sq", "momentum_buffer")


class DCPSource(Source):
    """Conversion source that reads a checkpoint of this program and verifies its files. If the path is the folder of a
    run, the latest checkpoint in the folder is read."""

    def __init__(self, path: PurePath, options: Options) -> None:
        remarks: list[str] = []
        checkpoint = choose_checkpoint(path, Axis(), remarks.append)
        if checkpoint is None:
            raise ValueError(f"{path} contains no checkpoint")
        self.checkpoint, self.notes = checkpoint, tuple(remarks)
        load_saved_extensions(checkpoint.payload, checkpoint.folder)
        self.config = saved_config(checkpoint)
        self.metas = {meta.name: meta for meta in stage_metas(self.config.model)}
        for name, meta in self.metas.items():
            info = checkpoint.tensors.get(model_key(name))
            if info is None or info.shape != meta.global_shape:
                what = "is missing" if info is None else f"has shape {info.shape} instead of {meta.global_shape}"
                raise ValueError(f"{checkpoint.folder} does not fit its own configuration: {model_key(name)} {what}")
        names = (meta.name for meta, _ in model_states(self.config.model))
        self.states = [name for name in names if model_key(name) in checkpoint.tensors]
        self.side_files = side_files_of(self.config.tokenizer)
        self.averages = None if options.weights is None else self._state(options.weights)
        progress = saved_progress(checkpoint.payload)
        self.origin = Origin.of(progress.origin)
        self.progress = None if converted(checkpoint) else progress

    def _state(self, wanted: str) -> str:
        """Return the prefix of the tensor keys that belong to the callback state `wanted`. Raises ValueError if no
        state matches `wanted`, or if several states match."""
        kept = [key.removeprefix(CALLBACKS) for key in self.checkpoint.tensors if key.startswith(CALLBACKS)]
        trained = [name for name, meta in self.metas.items() if not self.config.optimizer.freezes(meta)]
        ends = tuple(f".{name}" for name in trained[:1])
        states = sorted(key.removesuffix(ends[0]) for key in kept if key.endswith(ends))
        found = [state for state in states if wanted in (state, state.partition(".")[0])]
        if len(found) != 1:
            has = f"the checkpoint has {', '.join(states)}" if states else "the checkpoint has no averaged weights"
            remedy = "name one of them" if states else "train with --ema-decay, or remove the flag"
            raise ValueError(f"--weights {wanted}: {has}; {remedy}")
        if missing := [name for name in trained if f"{CALLBACKS}{found[0]}.{name}" not in self.checkpoint.tensors]:
            raise ValueError(f"--weights {wanted}: {self.checkpoint.folder} has no {found[0]} of {missing[0]}")
        return f"{CALLBACKS}{found[0]}."

    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        return wanted or self.checkpoint.tensors[model_key(name)].dtype

    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        """Return a complete, unsharded parameter. If `wanted` is None or the dtype of the stored parameter, the
        parameter itself is returned. Otherwise, the optimizer's main parameter is converted to `wanted`, or the
        parameter if the checkpoint contains no main parameter. If the user requested averaged weights, the average is
        returned instead for every parameter that has one.
        """
        if self.averages is not None and (average := f"{self.averages}{name}") in self.checkpoint.tensors:
            return self.checkpoint.read(average).to(self.dtype(name, wanted))
        key, main = model_key(name), optimizer_key(MAIN_PARAM, name)
        if self.dtype(name, wanted) != self.dtype(name, None) and main in self.checkpoint.tensors:
            key = main
        return self.checkpoint.read(key).to(self.dtype(name, wanted))

    def check_data(self) -> None:
        """Do nothing. The checksums were already verified when the checkpoint was opened."""

    def training(self) -> TrainingState | None:
        tensors = self.checkpoint.tensors
        kinds = [kind for kind in STATE_KINDS if any(key.startswith(optimizer_key(kind, "")) for key in tensors)]
        if not kinds or self.averages is not None:
            return None
        if missing := [
            (kind, name) for name in self.metas for kind in kinds if optimizer_key(kind, name) not in tensors
        ]:
            kind, name = missing[0]
            raise ValueError(
                f"{self.checkpoint.folder} has {kind} for some parameters but not for {name}, as with --optimizer "
                "muon and --freeze; give --weights-only"
            )
        return TrainingState(
            saved_progress(self.checkpoint.payload),
            int(self.checkpoint.payload["optimizer"]["step_count"]),
            tuple(kinds),
            lambda kind, name: self.checkpoint.read(optimizer_key(kind, name)),
            lambda kind, name: tensors[optimizer_key(kind, name)].dtype,
            self.checkpoint.payload["optimizer"]["loss_scaler"],
        )


class DCPTarget(Target):
    """Conversion target that writes a folder with a checkpoint, run_config.yaml, and the tokenizer's files. If the
    training state is not copied, the checkpoint contains only weights, and its iteration number is 0."""

    def __init__(self, source: Source, output: Path, options: Options) -> None:
        self.source, self.options = source, options
        copied = options.weights_only or options.dtype or isinstance(source, DCPSource)
        self.training = training = None if copied else source.training()
        self.tensors: dict[str, Made] = {}
        for name, meta in source.metas.items():
            read = partial(source.read, name, options.dtype)
            self.tensors[model_key(name)] = Made(meta.global_shape, source.dtype(name, options.dtype), read)
        if training is not None:
            for name, meta in source.metas.items():
                for kind in training.kinds:
                    read, dtype = partial(training.read, kind, name), training.dtype(kind, name)
                    self.tensors[optimizer_key(kind, name)] = Made(meta.global_shape, dtype, read)
        self.nbytes = sum(made.nbytes for made in self.tensors.values())
        self.config = replace(source.config, checkpoint=CheckpointConfig())
        if source.side_files:
            # In the configuration, the path of the tokenizer files is absolute and points to their final location.
            folder = output.resolve() / TOKENIZER_FOLDER
            self.config = replace(self.config, tokenizer=tokenizer_config(folder, source.side_files))

    def payload(self) -> dict[str, Any]:
        """Return the non-tensor content of the checkpoint."""
        training = self.training
        payload = {
            "format_version": FORMAT_VERSION,
            "torch_version": torch.__version__,
            **asdict(training.progress if training else Progress()),
            "origin": asdict(self.source.origin),
            "metrics": {},
            "layout": asdict(ParallelDims()) | {"use_distributed_optimizer": False},
            "optimizer": {
                "step_count": training.step_count if training else 0,
                "loss_scaler": dict(training.loss_scaler) if training else {},
            },
            "rng": {"seed": self.config.training.seed},
            "config": values_by_section(self.config),
        }
        if self.source.merged is not None:
            payload["merged"] = dict(self.source.merged)
        return payload if training else payload | {"converted": True}

    def write(self, folder: Path, world: Axis, written: Written) -> None:
        tensors: StateDict = {
            key: StreamedTensor(made.shape, made.dtype, made.counted(written))
            for key, made in share(self.tensors, world)
        }
        for meta, name in model_states(self.config.model) if world.first else ():
            dtype = getattr(torch, name)
            make = partial(self.source.read_state, meta, dtype)
            tensors[model_key(meta.name)] = StreamedTensor(meta.global_shape, dtype, make)
        iteration = self.training.progress.iteration if self.training else 0
        save(folder, iteration, tensors, self.payload(), world, writer=StreamingWriter)

    def finish(self, folder: Path) -> None:
        save_config(self.config, folder / RUN_CONFIG)
        for name, path in self.source.side_files.items():
            (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
            shutil.copyfile(path, folder / TOKENIZER_FOLDER / name)


class DCPFormat:
    """Conversion format for this program's own checkpoints."""

    format = "dcp"
    usual = False

    def open(self, path: PurePath, options: Options) -> Source:
        return DCPSource(path, options)

    def plan(self, source: Source, folder: Path, options: Options) -> Target:
        return DCPTarget(source, folder, options)
