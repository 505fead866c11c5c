"""Conversion target that writes Megatron-LM's torch_dist checkpoints. megatron-core can load these checkpoints under
any parallel layout."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.dist_checkpointing.path_kind import LATEST, checkpoint_folder
from megatron.core.dist_checkpointing.storage import save
from megatron.core.optimizer.param_scheduler import ScheduleLength
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.extensions.interop.conversion.formats import Options, Source, Target, TrainingState, Written
from megatron.extensions.interop.conversion.streaming import Made, StreamedTensor, StreamingWriter, share
from megatron.extensions.interop.megatron_checkpoints.common_state import scaler_state
from megatron.extensions.interop.megatron_checkpoints.flags import COMMON
from megatron.extensions.interop.megatron_checkpoints.legacy_states import BUFFER_KINDS
from megatron.extensions.interop.megatron_checkpoints.megatron_args import (
    DATA,
    OTHER_FORMULAS,
    arguments_of,
    refuse_inexpressible,
)
from megatron.extensions.interop.megatron_checkpoints.megatron_names import (
    EXTRA_STATE,
    LAYERS,
    Names,
    their_states,
    with_rows,
)
from megatron.training.config.batch_size import legal_sizes
from megatron.training.config.flags import named_value
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress

BACKEND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
RELEASE = "release"
"""Folder name of a checkpoint without an iteration number. The tracker file then contains this folder name instead of
an iteration."""


Place = tuple[tuple[str, ...], int | None]
"""Names of a tensor, and the tensor's index in a stack of layers. The index is None if layers are not stacked."""


class TorchDistTarget(Target):
    """Conversion target that writes a folder with one torch_dist checkpoint. If all layers have the same tensors, the
    tensors of all layers are stacked under one name."""

    def __init__(self, source: Source, output: Path, options: Options) -> None:
        self.source = source
        self.options = options
        self.config = source.config
        refuse_inexpressible(self.config)
        self.training = None if options.weights_only or options.dtype else source.training()
        if self.training is not None and "exp_avg" not in self.training.kinds:
            raise ValueError("only Adam's state can be written; give --weights-only to omit the optimizer state")
        optimizer, usual = self.config.optimizer, OptimizerConfig()
        own_groups = named_value(self.config, "param_group") or optimizer.weight_decay_on != usual.weight_decay_on
        if self.training is not None and own_groups:
            raise ValueError(
                "Megatron-LM's optimizer state lacks the parameter groups of --param-group and --weight-decay-on; give "
                "--weights-only to omit the optimizer state"
            )
        model, self.states = self.config.model, their_states(self.config.model)
        metas = (*source.metas.values(), *(meta for meta, _ in self.states.values()))
        self.names = Names(metas, hybrid=model.stated_layers is not None)
        layers = [layer for front, layer in self.names.layers.items() if front.startswith(LAYERS)]
        kinds = {frozenset((name, meta.global_shape) for name, meta in layer.items()) for layer in layers}
        self.stacked = len(kinds) == 1 and not self.names.hybrid and model.ffn_hidden_size_pattern is None
        self.tensors = dict(self._tensors())
        if self.training is not None and self.config.optimizer.decoupled_lr is not None:
            self.notes = (
                "--decoupled-lr: its parameter groups are marked is_decoupled_lr, but megatron-core 0.16 does "
                "not use this mark; compare the learning rates that it logs",
            )
        self.notes += (OTHER_FORMULAS,) * (model.residual == "mhc")
        self.nbytes = sum(made.nbytes for made in self.tensors.values())

    def _tensors(self) -> Iterator[tuple[Place, Made]]:
        """Yield all tensors of the checkpoint with their keys. A key (`Place`) contains the names of the tensor and, if
        layers are stacked, the tensor's index in the stack."""
        source, wanted = self.source, self.options.dtype
        for name, meta in source.metas.items():
            yield from self._pieces("", meta, source.dtype(name, wanted), partial(source.read, name, wanted))
        for name, (meta, dtype) in self.states.items():
            if name in source.states:
                read = partial(source.read, name, dtype)
                yield from self._pieces("", meta, dtype, partial(_rows, read, meta.global_shape[0]))
        for theirs, ours in BUFFER_KINDS.items() if self.training else ():
            for name, meta in source.metas.items():
                prefix = f"optimizer.state.{theirs}."
                yield from self._pieces(prefix, meta, torch.float32, partial(self._state, ours, name))

    def _pieces(
        self, prefix: str, meta: ParamMeta, dtype: torch.dtype, read: Callable[[], Tensor]
    ) -> Iterator[tuple[Place, Made]]:
        pieces, layer = self.names.written(meta, self.stacked)
        for piece in pieces:
            keys = tuple(prefix + each for each in piece.names)
            make = read if len(pieces) == 1 else partial(_channels, read, piece.channels)
            yield (keys, layer), Made(piece.shape, dtype, make)

    def _state(self, kind: str, name: str) -> Tensor:
        """Return the optimizer state of kind `kind` for a parameter. An fp32 model has no separate main parameters, so
        the parameter itself is returned as its main parameter."""
        assert self.training is not None
        if kind not in self.training.kinds:
            return self.source.read(name, torch.float32)
        return self.training.read(kind, name).to(torch.float32)

    def write(self, folder: Path, world: Axis, written: Written) -> None:
        parts: dict[str, dict[int, Callable[[], Tensor]]] = {}
        tensors: dict[str, Any] = {}
        for (keys, layer), made in share(self.tensors, world):
            make, shape = made.counted(written), made.shape
            for key in keys:
                if layer is None:
                    tensors[key] = StreamedTensor(shape, made.dtype, make)
                    continue
                entries = parts.setdefault(key, {})
                entries[layer] = make
                tensors[key] = StreamedTensor((self.config.model.num_layers, *shape), made.dtype, parts=entries)
        if world.first:
            tensors |= {key: [None] for key in self._extra_states()}
        save(folder, self.iteration, tensors, {**BACKEND, "common_backend_version": 1}, world, writer=StreamingWriter)

    @property
    def iteration(self) -> int:
        return self.training.progress.iteration if self.training else 0

    def _extra_states(self) -> list[str]:
        """Return the names of the `_extra_state` entries to write. Megatron-LM expects such an entry, which may be
        empty, for each linear layer."""
        model, keys = self.config.model, ["output_layer._extra_state/shard_0_1"]
        for name, meta in self.source.metas.items():
            if name.startswith("embedding.") or not name.endswith(".weight"):
                continue
            (piece, *_), layer = self.names.written(meta, self.stacked)
            module = piece.names[0].split(".weight")[0].split(".layer_norm_")[0]
            places = [f"{layer}_{model.num_layers}"] if layer is not None else ["0_1"]
            if meta.expert:
                count = model.num_experts or 0
                front, total = (f"{layer}.", f"{model.num_layers}.") if layer is not None else ("", "")
                places = [f"{front}{expert}_{total}{count}" for expert in range(count)]
            modules = [module, module.replace("linear_proj", "core_attention")]
            keys += [f"{each}.{EXTRA_STATE}/shard_{place}" for each in modules for place in places]
        return list(dict.fromkeys(keys))

    def finish(self, folder: Path) -> None:
        checkpoint = checkpoint_folder(folder, self.iteration)
        torch.save(self.common(), checkpoint / COMMON)
        if not self.iteration:
            checkpoint.rename(folder / RELEASE)
            (folder / LATEST).write_text(RELEASE)

    def common(self) -> dict[str, object]:
        """Return the non-tensor content of the checkpoint."""
        progress = self.training.progress if self.training else Progress()
        arguments = arguments_of(self.config) | {
            "iteration": self.iteration,
            "consumed_train_samples": progress.consumed_samples,
            "no_save_optim": self.training is None,
        }
        common = {
            "args": argparse.Namespace(**arguments),
            "checkpoint_version": 3.0,
            "iteration": self.iteration,
            "num_floating_point_operations_so_far": 0,
            "content_metadata": DATA["content"] | {"non_homogeneous_layers": not self.stacked},
        }
        if self.training is None:
            return common
        dense, experts = (self._optimizer(self.training.step_count, expert) for expert in (False, True))
        optimizer = {0: dense, 1: experts} if self.config.model.moe_layers else dense
        if self.config.parallel.fp16 and self.training.loss_scaler:
            state = scaler_state(self.training.loss_scaler, self.config.training.global_batch_size or 1)
            for each in (dense, experts):
                each["grad_scaler"] = state
        return common | {"optimizer": optimizer, "opt_param_scheduler": scheduler_state(self.config, self.training)}

    def _optimizer(self, step_count: int, expert: bool) -> dict[str, object]:
        """Return the non-tensor state of Megatron-LM's optimizer. There is one parameter group with weight decay and
        one without. If the embedding and output layers have a separate learning rate, each of these groups is divided
        into two groups."""
        options = self.config.optimizer
        group = DATA["group"] | {
            "is_expert_parallel": expert,
            "max_lr": options.lr,
            "min_lr": options.min_lr,
            "lr": options.lr,
            "betas": (options.adam_beta1, options.adam_beta2),
            "eps": options.adam_eps,
            "step": step_count,
        }
        groups = [group]
        if (own := options.decoupled) is not None and not expert:
            groups.append(group | {"is_decoupled_lr": True, "default_config": False, "lr": own.lr})
            groups[-1] |= {"max_lr": own.lr, "min_lr": own.min_lr}
        decays = ({"wd_mult": wd, "weight_decay": wd * options.weight_decay} for wd in (1.0, 0.0))
        groups = [each | decay for decay in decays for each in groups]
        return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": "fully_reshardable"}


def _channels(read: Callable[[], Tensor], channels: slice) -> Tensor:
    """Read a parameter with the function `read`, and return the same range of channels from every group."""
    return read()[:, channels]


def _rows(read: Callable[[], Tensor], rows: int) -> Tensor:
    """Read a table with the function `read`, and truncate or zero-pad the table to `rows` rows."""
    return with_rows(read(), rows)


def scheduler_state(config: RunConfig, training: TrainingState) -> dict[str, object]:
    """Return the state of Megatron-LM's learning rate and weight decay scheduler. This scheduler counts samples instead
    of steps."""
    options, run = config.optimizer, config.training
    state: dict[str, object] = {"num_steps": training.progress.scheduled_samples}
    if (run.train_iters is None) == (run.train_samples is None) or run.global_batch_size is None:
        return state
    if run.train_samples is not None:
        length = ScheduleLength.in_samples(options, run.train_samples)
    else:
        length = ScheduleLength.in_iterations(options, run.train_iters or 0, legal_sizes(config).samples)
    decay = options.weight_decay
    return state | {
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": length.warmup,
        "lr_decay_steps": length.decay,
        "lr_decay_style": options.lr_decay_style,
        "start_wd": decay if options.start_weight_decay is None else options.start_weight_decay,
        "end_wd": decay if options.end_weight_decay is None else options.end_weight_decay,
        "wd_incr_style": options.weight_decay_incr_style,
        "wd_incr_steps": length.total,
    }
