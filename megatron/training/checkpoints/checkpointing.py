"""Save and load a run's state, and check that a checkpoint fits the run that loads it.

The state consists of the parameters, the optimizer's tensors, its update count and loss scale, the `Progress`, and the
states of extensions' callbacks. A run needs no other state to resume. The learning rate is computed from the progress.
Initial values, dropout and data order are functions of the seed and a position, so there is no random-number generator
state to save. A run that keeps the seed of its checkpoint resumes exactly, under any layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import PurePath
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of, refusal
from megatron.core.dist_checkpointing.state_dict import (
    MODEL,
    StateDict,
    callback_prefix,
    callback_targets,
    load_targets,
    model_state,
    optimizer_state,
)
from megatron.core.dist_checkpointing.storage import Checkpoint, MismatchError, on_first_rank, save
from megatron.core.models.gpt.gpt_model import GPTModel, WeightSetup
from megatron.core.models.gpt.multi_token import MULTI_TOKEN
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.layer_split import pipeline_stages
from megatron.core.pipeline_parallel.stages import pipeline_layout, tied_stages
from megatron.training.checkpoints.loading import (
    FORMAT_VERSION,
    check_fits,
    check_may_start,
    choose_checkpoint,
    converted,
    mismatch_remedy,
    saved_config,
    saved_progress,
    tell_of_new_tokens,
    tell_of_other_groups,
    unused_tensors,
    without_new_tensors,
    without_states_of_thawed,
)
from megatron.training.config.flags import values_by_section
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import changed_lengths
from megatron.training.extensions import load_saved_extensions
from megatron.training.hooks import Callback
from megatron.training.plan import RunPlan
from megatron.training.progress import Progress

Fingerprint = Callable[[int], str | None]
"""Function that maps a number of consumed samples to the fingerprint of the data from which these samples came. The
function returns None if the data have no fingerprint."""


def no_fingerprint(consumed_samples: int) -> None:
    return None


@dataclass(frozen=True)
class RunCheckpoint:
    """One rank's part of a run's checkpoint, and methods that load checkpoints. `CheckpointWriter` writes checkpoints,
    in the foreground or in the background, and deletes older ones. All methods of this class are collective."""

    config: RunConfig
    state: ParallelState
    stages: Mapping[int, nn.Module]
    optimizer: DistributedOptimizer
    plan: RunPlan | None = None
    """Plan of the training run, or None if the run does not train."""
    callbacks: Sequence[Callback] = ()
    """Callbacks of the run. The states of these callbacks are stored in checkpoints."""

    def config_at(self, consumed_samples: int) -> RunConfig:
        """Return the configuration with the model flags of the phase that was trained last."""
        if self.plan is None:
            return self.config
        return replace(self.config, model=self.plan.trained(consumed_samples).config.model)

    def contents(
        self, progress: Progress, metrics: Mapping[str, float | None] | None = None
    ) -> tuple[StateDict, dict[str, object]]:
        """Return the tensors and the other values that a checkpoint of `progress.iteration` contains. The tensors are
        not copied.

        `metrics` contains values that were measured at this iteration. The choice of the older checkpoints to delete
        may depend on these metrics.
        """
        config = self.config
        optimizer = self.optimizer
        zero = self.config.optimizer.use_distributed_optimizer
        if self.plan is not None:
            past = self.plan.sizes.points(progress.iteration, progress.consumed_samples)
            progress = replace(progress, past_batches=past)
        optimizer.finish_param_sync()
        tensors = model_state(self.stages.values(), self.state, optimizer.ddp.sharded_params())
        if config.checkpoint.save_optim:
            tensors |= optimizer_state(optimizer.sharded_state(), self.state, zero)
        for callback in self.callbacks:
            prefix = callback_prefix(_name_of(callback))
            tensors |= optimizer_state(callback.states, self.state, zero, prefix)
        payload = {
            "format_version": FORMAT_VERSION,
            "torch_version": torch.__version__,
            **asdict(progress),
            "metrics": dict(metrics or {}),
            "layout": asdict(self.state.dims) | {"use_distributed_optimizer": zero},
            "optimizer": {"step_count": optimizer.step_count, "loss_scaler": optimizer.scaler.state_dict()},
            "rng": {"seed": config.training.seed},
            "config": values_by_section(self.config_at(progress.consumed_samples)),
            "callbacks": callback_states(self.callbacks),
        }
        if self.plan is not None:
            own = values_by_section(config)["model"]
            there = payload["config"]["model"]
            payload["stages"] = self.plan.record(progress.consumed_samples)
            payload["model_of_run"] = {name: value for name, value in own.items() if value != there[name]}
        return tensors, payload

    def save(self, progress: Progress) -> PurePath:
        """Write a checkpoint of `progress.iteration` into the --save folder and make it the latest.

        If the checkpoint cannot be written, the method raises CheckpointError on every rank, and the previous
        checkpoint remains the latest.
        """
        root = self.config.checkpoint.save_root
        assert root is not None
        return save(root, progress.iteration, *self.contents(progress), self.state.world)

    def load(
        self, say: Callable[[str], None] = lambda line: None, data: Fingerprint = no_fingerprint, why: str = ""
    ) -> Progress:
        """Load the newest complete and undamaged checkpoint in --load into the parameters and the optimizer. The
        checkpoint may have been saved under any layout.

        The method prints which checkpoints were skipped and why, what was loaded, and where the run starts. Return the
        position at which the run starts. The run starts at iteration 0 if there is no checkpoint, or with --finetune or
        --reset-iteration.

        Args:
            say: Function that prints a line.
            data: Function that maps a number of consumed samples to the fingerprint of the run's data.
            why: Reason for loading from the checkpoint's folder, which the log reports.

        Raises:
            ValueError: Raised on every rank if the checkpoint does not fit the run, or if the samples that were
                consumed before the checkpoint differ from the samples of this run's data.
        """
        options = self.config.checkpoint
        checkpoint = _choose(self.config, self.state.world, say)
        if checkpoint is None:
            if options.load is not None:
                refused = "--exit-on-missing-checkpoint refuses such a start"
                say(f" no checkpoint in --load {options.load}: starting at iteration 0 with random weights; {refused}")
            return Progress(data_fingerprint=data(0))
        return self.resume_with(checkpoint, say, data, f"{options.load}{why}")

    def resume_with(
        self, checkpoint: Checkpoint, say: Callable[[str], None], data: Fingerprint, source: str
    ) -> Progress:
        """Resume from an open checkpoint in the same way as `load`. The log line names `source` as the origin of the
        checkpoint."""
        options = self.config.checkpoint
        consumed = int(checkpoint.payload.get("consumed_samples") or 0)
        config, data_fingerprint = self.config_at(consumed), data(consumed)
        load_optimizer = options.load_optim and not options.finetune and not converted(checkpoint)
        check_fits(checkpoint, config, load_optimizer, data_fingerprint)
        self._load_tensors(checkpoint, config, load_optimizer, say)
        tell_of_new_tokens(saved_config(checkpoint), config, say)
        saved_position = saved_progress(checkpoint.payload)
        progress = Progress(origin=saved_position.origin) if options.anew else saved_position
        if not options.load_lr_state:
            progress.scheduled_samples = 0
        elif self.plan is not None and not options.anew:
            saved = saved_config(checkpoint)
            progress.scheduled_samples = self.plan.schedule_position(progress.scheduled_samples, saved)
        progress.data_fingerprint = (data(0) if options.anew else data_fingerprint) or progress.data_fingerprint
        progress.loaded_from = str(checkpoint.folder)
        what, how = ("checkpoint", "") if load_optimizer else ("weights", " with a fresh optimizer")
        loaded = f"{what} of iteration {checkpoint.payload['iteration']} from {source}"
        say(f" loaded {loaded}: starting at iteration {progress.iteration}{how}")
        if not options.anew:
            _load_callbacks(checkpoint.payload.get("callbacks", {}), self.callbacks, say)
        goes_on = not (options.anew or converted(checkpoint) or config.training.skip_train)
        if goes_on:
            self._tell_of_other_lengths(saved_config(checkpoint), progress, say)
        return progress

    def resume_from(self, load: str, say: Callable[[str], None], data: Fingerprint, why: str) -> Progress:
        """Load a checkpoint from the folder `load` instead of --load. The log line gives `why` as the reason."""
        options = replace(self.config.checkpoint, load=load)
        return replace(self, config=replace(self.config, checkpoint=options)).load(say, data, why)

    def _load_tensors(
        self, checkpoint: Checkpoint, config: RunConfig, load_optimizer: bool, say: Callable[[str], None]
    ) -> None:
        """Load the parameters. If `load_optimizer` is True, also load the optimizer's tensors and counters. Raises
        ValueError if the tensors in the checkpoint do not match those of the run."""
        with self.optimizer.loading_state() as pieces:
            ddp, stages = self.optimizer.ddp, self.stages.values()
            ddp.drop_params()
            sharded = ddp.sharded_params()
            targets = load_targets(stages, pieces, self.state, checkpoint.tensors, load_optimizer, sharded)
            targets = without_new_tensors(targets, checkpoint)
            for callback in self.callbacks if not config.checkpoint.anew else ():
                prefix = callback_prefix(_name_of(callback))
                targets |= callback_targets(callback.states, self.state, checkpoint.tensors, prefix)
            if load_optimizer:
                tell_of_other_groups(saved_config(checkpoint), config, say)
                targets = without_states_of_thawed(targets, checkpoint, say)
            try:
                unused = unused_tensors(checkpoint, load_optimizer, config)
                checkpoint.load(targets, self.state.world, ignore=unused)
            except MismatchError as error:
                raise ValueError(f"{error}{mismatch_remedy(error.keys)}") from None
        if load_optimizer:
            _load_counters(checkpoint, self.optimizer)

    def _tell_of_other_lengths(self, saved: RunConfig, progress: Progress, say: Callable[[str], None]) -> None:
        if line := changed_lengths(saved, self.config):
            say(f" {line}")
        if self.plan is not None and (line := self.plan.changed_batch(saved, progress.past_batches)):
            say(f" {line}")


@runtime_checkable
class LoadsModels(Protocol):
    """Loader for paths to models in the format of another program. An extension registers the loader in `PATH_KINDS`.
    The methods `start` and `stages` are collective."""

    def start(self, checkpoint: RunCheckpoint, say: Callable[[str], None], data: Fingerprint) -> Progress:
        """Load the model that --load names into the parameters and the optimizer, as `RunCheckpoint.load` does."""

    def stages(
        self,
        path: PurePath,
        layout_of: Callable[[RunConfig], ModelParallelConfig],
        state: ParallelState,
        device: torch.device | str,
        number_format: str | None,
    ) -> tuple[dict[int, GPTModel], RunConfig]:
        """Load this rank's pipeline stages of the model at a path, as `load_stages` does."""


def _loader_of(path: PurePath | str, state: ParallelState) -> LoadsModels | None:
    """Return the loader of a model in another program's format, or None for this program's checkpoints."""
    kind = PATH_KINDS[on_first_rank(lambda: kind_of(path), state.world)]
    return kind if isinstance(kind, LoadsModels) else None


def load_start(
    checkpoint: RunCheckpoint, say: Callable[[str], None] = lambda line: None, data: Fingerprint = no_fingerprint
) -> Progress:
    """Load parameters and optimizer at the start of a run, and return the run's position. Collective.

    The weights are loaded from the checkpoint that a callback provides. If no callback provides a checkpoint, the
    weights are loaded from the checkpoint or model in --load.
    """
    for callback in sorted(checkpoint.callbacks, key=lambda each: each.start_order):
        if (progress := callback.start(checkpoint, say, data)) is not None:
            return progress
    load = checkpoint.config.checkpoint.load
    loader = None if load is None else _loader_of(load, checkpoint.state)
    return checkpoint.load(say, data) if loader is None else loader.start(checkpoint, say, data)


def callback_states(callbacks: Sequence[Callback]) -> dict[str, object]:
    """Return copies of the callbacks' states, by callback name. Raises ValueError if a state cannot be saved."""
    states: dict[str, object] = {}
    for callback in callbacks:
        name, state = _name_of(callback), callback.state()
        if state is None:
            continue
        if name in states:
            raise ValueError(f"two callbacks named {name} keep state in checkpoints: give one of them another `name`")
        try:
            states[name] = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise ValueError(f"callback {name}: state() must return values of JSON's types only: {error}") from None
    return states


def _name_of(callback: Callback) -> str:
    return callback.name or type(callback).__name__


def _load_callbacks(states: Mapping[str, object], callbacks: Sequence[Callback], say: Callable[[str], None]) -> None:
    there = {_name_of(callback): callback for callback in callbacks}
    for name in [name for name in states if name in there]:
        try:
            there[name].load_state(states[name])
        except (TypeError, LookupError, AttributeError, ArithmeticError, ValueError) as error:
            raise ValueError(
                f"callback {name} cannot load its state from the checkpoint ({type(error).__name__}: {error}); remove "
                "the callback, or load another checkpoint"
            ) from error
    if gone := [name for name in states if name not in there]:
        say(f" the checkpoint has state of callbacks that are not in this run, which is ignored: {', '.join(gone)}")


def load_whole_model(path: PurePath | str, number_format: str | None = None) -> tuple[GPTModel, RunConfig]:
    """Load the whole model of a checkpoint into one process. `number_format` is the number format of the weights, such
    as "bf16"; None keeps the stored number format."""
    stages, config = load_stages(path, lambda config: ModelParallelConfig(), ParallelState(), "cpu", number_format)
    return stages[0], config


def load_stages(
    path: PurePath | str,
    layout_of: Callable[[RunConfig], ModelParallelConfig],
    state: ParallelState,
    device: torch.device | str = "cpu",
    number_format: str | None = None,
) -> tuple[dict[int, GPTModel], RunConfig]:
    """Load this rank's pipeline stages of a model, and the model's configuration, from a checkpoint or through an
    extension. Collective.

    Multi-token prediction modules are omitted, because only training uses them.

    Args:
        path: Path of the checkpoint or model.
        layout_of: Function that returns the layout for a configuration. The function must not use the configuration's
            number format. The function raises ValueError if the model does not fit any layout.
        state: Process groups of the ranks that load the model.
        device: Device of the model.
        number_format: Number format of the weights; None keeps the number format of the checkpoint.
    """
    if (loader := _loader_of(path, state)) is not None:
        return loader.stages(located(path), layout_of, state, device, number_format)
    checkpoint = choose_checkpoint(located(path), state.world)
    if checkpoint is None:
        raise ValueError(f"--load {refusal(path)}")
    load_saved_extensions(checkpoint.payload, checkpoint.folder)
    config = saved_config(checkpoint)
    stages = stages_without_weights(config, layout_of(config), state, device, number_format)
    targets = load_targets(stages.values(), [], state, checkpoint.tensors, load_optimizer=False)
    targets = without_new_tensors(targets, checkpoint)
    unused = unused_tensors(checkpoint, load_optimizer=False)
    checkpoint.load(targets, state.world, ignore=lambda key: unused(key) or key.startswith(MODEL + MULTI_TOKEN))
    return stages, config


def stages_without_weights(
    config: RunConfig,
    layout: ModelParallelConfig,
    state: ParallelState,
    device: torch.device | str,
    number_format: str | None = None,
) -> dict[int, GPTModel]:
    """Build this rank's pipeline stages of a model that will not be trained, without initializing their weights."""
    dtypes = {name: getattr(config.parallel, name) for name in ("fp16", "bf16", "fp32", "fp64")}
    parallel = replace(layout, **(dtypes if number_format is None else {number_format: True}))
    model = replace(config.model, mtp_num_layers=None)
    pipeline, holds = pipeline_layout(model, parallel), pipeline_stages(model, parallel)
    return {
        stage: GPTModel(
            model,
            parallel,
            state,
            replace(holds[stage], tied_stages=tied_stages(model, pipeline)),
            weights=WeightSetup(device, initialize=False),
        ).eval()
        for stage in pipeline.stages_of(state.pp.rank)
    }


def _choose(config: RunConfig, world: Axis, say: Callable[[str], None]) -> Checkpoint | None:
    options = config.checkpoint
    if options.load is None:
        return None
    checkpoint = choose_checkpoint(located(options.load), world, say)
    if checkpoint is None:
        check_may_start(options)
    return checkpoint


def _load_counters(checkpoint: Checkpoint, optimizer: DistributedOptimizer) -> None:
    """Load the optimizer's update count. If both the checkpoint and the run use dynamic loss scaling, also load the
    loss scale."""
    saved = checkpoint.payload["optimizer"]
    optimizer.step_count = saved["step_count"]
    if saved["loss_scaler"].keys() == optimizer.scaler.state_dict().keys():
        optimizer.scaler.load_state_dict(saved["loss_scaler"])
