"""Saves and loads the state of a run, and checks that a checkpoint fits the run that loads it.

State is the parameters, the optimizer's tensors, its count of updates and loss scale, the `Progress`, and what
callbacks of extensions keep. There is no more: the learning rate follows from the progress, and initial values, dropout
and data order from the seed and a position, so no generator has a state to save. The seed stands in its place: a run
resumes exactly under the seed it was saved with, at any layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.dist_checkpointing.async_saver import CheckpointSaver
from megatron.core.dist_checkpointing.latest_checkpoint import choose_checkpoint
from megatron.core.dist_checkpointing.path_kind import LATEST, kind_of, refusal
from megatron.core.dist_checkpointing.state_dict import (
    MAIN_PARAM,
    MODEL,
    OPTIMIZER,
    StateDict,
    load_targets,
    model_state,
    optimizer_key,
    optimizer_state,
)
from megatron.core.dist_checkpointing.storage import Checkpoint, MismatchError, on_first_rank, save
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.parameters import MULTI_TOKEN
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.param_meta import HISTORY
from megatron.core.parts import CHECKPOINT_CLEANUPS, MODEL_LOADERS, STATE_STORES
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages, tied_stages
from megatron.training.config.flags import config_of_sections, named_value, values_by_section
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.config.saved_flags import changed_fields, changed_lengths, free_choices, past_batches
from megatron.training.extensions import load_saved_extensions
from megatron.training.hooks import Callback
from megatron.training.plan import RunPlan
from megatron.training.progress import Progress

FORMAT_VERSION = 1

PAYLOAD = {"iteration": int, "consumed_samples": int, "config": dict, "optimizer": dict, "rng": dict}
"""Entries besides tensors that a checkpoint needs for a run to resume from it."""


Fingerprint = Callable[[int], str | None]
"""Consumed samples -> what identifies the data that they came from; None if nothing does."""


def no_fingerprint(consumed_samples: int) -> None:
    return None


@dataclass(frozen=True)
class Checkpointer:
    """Contents of a run's checkpoint on one rank, saved and loaded. All methods are collective."""

    config: RunConfig
    state: ParallelState
    stages: Mapping[int, nn.Module]
    optimizer: DistributedOptimizer
    plan: RunPlan | None = None
    """None where nothing is trained."""
    callbacks: Sequence[Callback] = ()
    """Those of the run, of which some keep state."""

    def config_at(self, consumed_samples: int) -> RunConfig:
        """The configuration with the model's flags of the phase that was trained last."""
        if self.plan is None:
            return self.config
        return replace(self.config, model=self.plan.trained(consumed_samples).config.model)

    def contents(
        self, progress: Progress, metrics: Mapping[str, float | None] | None = None
    ) -> tuple[StateDict, dict[str, Any]]:
        """(tensors, the rest) of a checkpoint of `progress.iteration`. The tensors are the live ones.

        `metrics`: what was measured at this iteration, for cleanups to choose by.
        """
        config, optimizer, zero = self.config, self.optimizer, self.config.optimizer.use_distributed_optimizer
        if self.plan is not None:
            past = self.plan.sizes.points(progress.iteration, progress.consumed_samples)
            progress = replace(progress, past_batches=past)
        optimizer.finish_param_sync()
        tensors = model_state(self.stages.values(), self.state, optimizer.ddp.sharded_params())
        if config.checkpoint.save_optim:
            tensors |= optimizer_state(optimizer.sharded_state(), self.state, zero)
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

    def save(self, progress: Progress) -> Path:
        """Writes a checkpoint of `progress.iteration` into --save and makes it the latest.

        Raises CheckpointError on every rank if it could not be written; the latest checkpoint is then the one before.
        """
        assert self.config.checkpoint.save is not None
        return save(Path(self.config.checkpoint.save), progress.iteration, *self.contents(progress), self.state.world)

    def load(
        self, say: Callable[[str], None] = lambda line: None, data: Fingerprint = no_fingerprint, why: str = ""
    ) -> Progress:
        """Loads the newest complete and undamaged checkpoint of --load, saved at any layout, into the parameters and
        the optimizer. Says which were skipped and why, and in one line what was loaded, from where (and `why` from
        there), and where the run starts.

        Returns where the run stands: at the start if there is no checkpoint, or under --finetune or
        --reset-iteration. Raises ValueError, on
        every rank, if the checkpoint does not fit the run, or the run's data, whose fingerprint at a number of consumed
        samples is `data`, is not what its data position refers to.
        """
        config, options = self.config, self.config.checkpoint
        checkpoint = _choose(config, self.state.world, say)
        if checkpoint is None:
            if options.load is not None:
                refused = "--exit-on-missing-checkpoint refuses such a start"
                say(f" no checkpoint in --load {options.load}: starting at iteration 0 with random weights; {refused}")
            return Progress(data_fingerprint=data(0))
        consumed = int(checkpoint.payload.get("consumed_samples") or 0)
        config, data_fingerprint = self.config_at(consumed), data(consumed)
        load_optimizer = options.load_optim and not options.finetune and not converted(checkpoint)
        check_fits(checkpoint, config, load_optimizer, data_fingerprint)
        with self.optimizer.loading_state() as pieces:
            ddp, stages = self.optimizer.ddp, self.stages.values()
            ddp.drop_params()
            sharded = ddp.sharded_params()
            targets = load_targets(stages, pieces, self.state, checkpoint.tensors, load_optimizer, sharded)
            targets = _without_new_tensors(targets, checkpoint)
            if load_optimizer:
                _tell_of_other_groups(saved_config(checkpoint), config, say)
                targets = _without_states_of_thawed(targets, checkpoint, say)
            try:
                checkpoint.load(targets, self.state.world, ignore=_unused(checkpoint, load_optimizer, config.optimizer))
            except MismatchError as error:
                raise ValueError(f"{error}{_remedy(error.keys)}") from None
        if load_optimizer:
            _load_counters(checkpoint, self.optimizer)
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
        loaded = f"{what} of iteration {checkpoint.payload['iteration']} from {options.load}{why}"
        say(f" loaded {loaded}: starting at iteration {progress.iteration}{how}")
        if not options.anew:
            _load_callbacks(checkpoint.payload.get("callbacks", {}), self.callbacks, say)
        goes_on = not (options.anew or converted(checkpoint) or config.training.skip_train)
        if goes_on:
            self._tell_of_other_lengths(saved_config(checkpoint), progress, say)
        return progress

    def _tell_of_other_lengths(self, saved: RunConfig, progress: Progress, say: Callable[[str], None]) -> None:
        if line := changed_lengths(saved, self.config):
            say(f" {line}")
        if self.plan is not None and (line := self.plan.changed_batch(saved, progress.past_batches)):
            say(f" {line}")


@dataclass(frozen=True)
class ModelLoader:
    """Loads models of one kind of path that are no checkpoints of ours. Both functions are collective."""

    start: Callable[[Checkpointer, Callable[[str], None], Fingerprint], Progress]
    """Loads what --load names into parameters and optimizer, as `Checkpointer.load` does."""

    stages: Callable[..., tuple[dict[int, GPTModel], RunConfig]]
    """As `load_stages`."""


def load_start(
    checkpointer: Checkpointer, say: Callable[[str], None] = lambda line: None, data: Fingerprint = no_fingerprint
) -> Progress:
    """Loads what --load names, a checkpoint or what an extension has a `ModelLoader` for, into parameters and
    optimizer, and returns where the run stands. Collective."""
    load = checkpointer.config.checkpoint.load
    kind = "" if load is None else on_first_rank(lambda: kind_of(load), checkpointer.state.world)
    return MODEL_LOADERS[kind].start(checkpointer, say, data) if kind in MODEL_LOADERS else checkpointer.load(say, data)


def callback_states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """Name -> a copy of its state, of the callbacks that have one. Raises ValueError if one cannot be kept."""
    states: dict[str, Any] = {}
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


def _load_callbacks(states: Mapping[str, Any], callbacks: Sequence[Callback], say: Callable[[str], None]) -> None:
    there = {_name_of(callback): callback for callback in callbacks}
    for name in [name for name in states if name in there]:
        there[name].load_state(states[name])
    if gone := [name for name in states if name not in there]:
        say(f" the checkpoint has state of callbacks that are not in this run, which is ignored: {', '.join(gone)}")


def build_saver(config: RunConfig, world: Axis, progress: Progress) -> CheckpointSaver | None:
    """The writer of the run's checkpoints; None without --save. Collective over the world."""
    options = config.checkpoint
    if options.save is None:
        return None
    cleanups = [CHECKPOINT_CLEANUPS[name](config) for name in CHECKPOINT_CLEANUPS.wanted(config)]
    saver = CheckpointSaver(Path(options.save), world, background=options.async_save, cleanups=cleanups)
    saver.held += [Path(progress.loaded_from)] if progress.loaded_from else []
    return saver


def load_whole_model(path: Path | str, number_format: str | None = None) -> tuple[GPTModel, RunConfig]:
    """The whole model of a checkpoint in one process, in its own number format or in "fp32", "bf16" and so on."""
    stages, config = load_stages(path, lambda config: ModelParallelConfig(), ParallelState(), "cpu", number_format)
    return stages[0], config


def load_stages(
    path: Path | str,
    layout_of: Callable[[RunConfig], ModelParallelConfig],
    state: ParallelState,
    device: torch.device | str = "cpu",
    number_format: str | None = None,
) -> tuple[dict[int, GPTModel], RunConfig]:
    """This rank's pipeline stages of the model of a checkpoint, or of what an extension has a `ModelLoader` for, and
    its configuration. Collective.

    `layout_of` says how the model of a configuration is cut, whatever its number format, or refuses it. The modules of
    multi-token prediction, which only training has a use for, are left out.
    """
    if (kind := on_first_rank(lambda: kind_of(path), state.world)) in MODEL_LOADERS:
        return MODEL_LOADERS[kind].stages(Path(path), layout_of, state, device, number_format)
    checkpoint = choose_checkpoint(Path(path), state.world)
    if checkpoint is None:
        raise ValueError(f"--load {refusal(path)}")
    load_saved_extensions(checkpoint.payload, checkpoint.folder)
    config = saved_config(checkpoint)
    stages = stages_without_weights(config, layout_of(config), state, device, number_format)
    targets = load_targets(stages.values(), [], state, checkpoint.tensors, load_optimizer=False)
    targets = _without_new_tensors(targets, checkpoint)
    unused = _unused(checkpoint, load_optimizer=False)
    checkpoint.load(targets, state.world, ignore=lambda key: unused(key) or key.startswith(MODEL + MULTI_TOKEN))
    return stages, config


def stages_without_weights(
    config: RunConfig,
    layout: ModelParallelConfig,
    state: ParallelState,
    device: torch.device | str,
    number_format: str | None = None,
) -> dict[int, GPTModel]:
    """This rank's pipeline stages of a model that is not trained further, their weights yet to be loaded."""
    dtypes = {name: getattr(config.parallel, name) for name in ("fp16", "bf16", "fp32", "fp64")}
    parallel = replace(layout, **(dtypes if number_format is None else {number_format: True}))
    model = replace(config.model, mtp_num_layers=None)
    pipeline, holds = pipeline_layout(model, parallel), pipeline_stages(model, parallel)
    return {
        stage: GPTModel(
            model,
            parallel,
            state,
            **vars(holds[stage]),
            tied_stages=tied_stages(model, pipeline),
            device=device,
            initialize=False,
        ).eval()
        for stage in pipeline.stages_of(state.pp.rank)
    }


def saved_config(checkpoint: Checkpoint) -> RunConfig:
    """The configuration that a checkpoint was saved under. Raises ValueError if this version cannot read it."""
    version = checkpoint.payload.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {checkpoint.folder} has format version {version}, and this program reads {FORMAT_VERSION}: "
            "load it with the version of the program that saved it"
        )
    for name, kind in PAYLOAD.items():
        value = checkpoint.payload.get(name)
        if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
            raise ValueError(f"checkpoint {checkpoint.folder} cannot be read: its {name} is {f'{value!r}'[:40]}")
    return config_of_sections(checkpoint.payload["config"])


def _choose(config: RunConfig, world: Axis, say: Callable[[str], None]) -> Checkpoint | None:
    options = config.checkpoint
    if options.load is None:
        return None
    checkpoint = choose_checkpoint(Path(options.load), world, say)
    if checkpoint is None:
        check_may_start(options)
    return checkpoint


def check_may_start(options: CheckpointConfig) -> None:
    """Raises ValueError if --load has no checkpoint and the run may not start from scratch."""
    flag = "--finetune" if options.finetune else "--exit-on-missing-checkpoint"
    if options.finetune or options.exit_on_missing_checkpoint:
        raise ValueError(
            f"{flag} needs a checkpoint, and --load {options.load} holds no checkpoint (there is no {LATEST} in it): "
            f"correct the path, or drop {flag} to start from scratch"
        )
    if not options.may_be_missing and not Path(str(options.load)).exists():
        raise ValueError(
            f"--load {options.load} does not exist, and is not the folder of --save; correct the path, or add "
            "--allow-missing-checkpoint to start from scratch"
        )


def check_fits(checkpoint: Checkpoint, config: RunConfig, load_optimizer: bool, data_fingerprint: str | None) -> None:
    """Raises ValueError, with every difference at once, if the run would not continue what was saved. Data are compared
    if both fingerprints are known."""
    options, saved, problems = config.checkpoint, saved_config(checkpoint), []
    if not options.finetune:
        ignored = free_choices(saved) if converted(checkpoint) else frozenset[str]()
        if changed := changed_fields(saved, config, checkpoint.payload["config"], ignored):
            problems.append(
                "the run computes something else: " + ", ".join(changed) + "; give the checkpoint's values, "
                "or --finetune to load weights of equal shapes only and start at iteration 0"
            )
        if options.load_rng and not converted(checkpoint) and saved.training.seed != config.training.seed:
            problems.append(
                f"--seed is {saved.training.seed} in the checkpoint and {config.training.seed} in the run, which gives "
                "other dropout and data order: give the checkpoint's, or --no-load-rng to continue with the new one"
            )
        # Other data are no matter where none are trained on, or from the start.
        other = options.override_data_fingerprint or options.reset_iteration or config.training.skip_train
        if problem := _other_data(checkpoint, other, data_fingerprint):
            problems.append(problem)
    if load_optimizer and not any(key.startswith(OPTIMIZER) for key in checkpoint.tensors):
        problems.append("it has no optimizer state: give --no-load-optim to continue with fresh moments, or --finetune")
    elif load_optimizer:
        matrices = config.optimizer.matrices
        problems += [
            f"--{field.replace('_', '-')} is {before} in the checkpoint and {now} in the run: give the checkpoint's, "
            "or --no-load-optim to start the new one afresh"
            for field in ("optimizer", *(matrices.fields if matrices is not None else ()))
            for before, now in [(named_value(saved, field), named_value(config, field))]
            if before != now
        ]
    if problems:
        raise ValueError(f"checkpoint {checkpoint.folder} does not fit the run: " + "; ".join(problems))


def converted(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint was made of another format: weights that no run of this program has trained."""
    return checkpoint.payload.get("converted") is True


def _other_data(checkpoint: Checkpoint, override: bool, now: str | None) -> str | None:
    before, consumed = checkpoint.payload.get("data_fingerprint"), checkpoint.payload.get("consumed_samples")
    if override or not consumed or None in (before, now) or before == now:
        return None
    return (
        f"the training data is not what its {consumed} consumed samples came from (fingerprint {before} in the "
        f"checkpoint, {now} in the run), so that samples would be repeated and left out: give the same data, split, "
        "seed, sequence length and length of the run, or --override-data-fingerprint to continue with the new data at "
        f"sample {consumed}"
    )


def _without_new_tensors(targets: StateDict, checkpoint: Checkpoint) -> StateDict:
    """The targets without histories that the checkpoint has not, or of another length: they start empty, as a run may
    turn on fp8, or another recipe, at any time. So do optional states that it has not."""

    def saved(key: str) -> bool:
        return key in checkpoint.tensors and checkpoint.tensors[key].shape == tuple(targets[key].shape)

    return {k: target for k, target in targets.items() if not (k.endswith(HISTORY) or _is_optional(k)) or saved(k)}


def _is_optional(key: str) -> bool:
    """Whether a checkpoint may lack the state, or a run have no use for it."""
    kinds = (kind for store in STATE_STORES for kind in STATE_STORES.facts(store).optional)
    return key.startswith(tuple(optimizer_key(kind, "") for kind in kinds))


def _without_states_of_thawed(targets: StateDict, checkpoint: Checkpoint, say: Callable[[str], None]) -> StateDict:
    """The targets without optimizer states of parameters that were frozen when the checkpoint was saved and are trained
    now: these begin at zero."""
    saved = saved_config(checkpoint)
    missing = [key for key in targets if key.startswith(OPTIMIZER) and key not in checkpoint.tensors]
    thawed = {key for key in missing if saved.optimizer.freezes(_parameter_of(key))}
    if thawed:
        say(
            f" the checkpoint was saved with --freeze {' '.join(named_value(saved, 'freeze'))}: optimizer states of "
            "parameters that are trained again start at zero"
        )
    return {key: target for key, target in targets.items() if key not in thawed}


def _remedy(keys: Sequence[str]) -> str:
    """The remedy if only states of the optimizer do not match: other versions updated some parameters by another
    rule."""
    if not all(key.startswith(OPTIMIZER) for key in keys):
        return ""
    return "; another optimizer updated these parameters: give --no-load-optim to start all states afresh"


def _tell_of_other_groups(saved: RunConfig, config: RunConfig, say: Callable[[str], None]) -> None:
    """Says which parameters have another factor of the learning rate, or another weight decay, than in the checkpoint's
    run: the flags of this run count."""
    if not saved.optimizer.has_own_groups and not config.optimizer.has_own_groups:
        return
    pairs = {
        meta.name: (saved.optimizer.group_of(meta.name, meta.kind), config.optimizer.group_of(meta.name, meta.kind))
        for meta in stage_metas(config.model)
    }
    if other := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        name, (before, now) = next(iter(other.items()))
        say(f" {len(other)} parameters have another group than in the checkpoint, {name}: {before} there, {now} now")


def _parameter_of(key: str) -> str:
    """`decoder.layers.0.mlp.linear_fc1.weight` of `optimizer.exp_avg.decoder...`."""
    return key.removeprefix(OPTIMIZER).partition(".")[2]


def _unused(
    checkpoint: Checkpoint, load_optimizer: bool, optimizer: OptimizerConfig | None = None
) -> Callable[[str], bool]:
    """Which keys of a checkpoint are rightly not loaded: a parameter with a main copy is loaded from that, a run may
    have no use for histories and optional states, and none for optimizer states of parameters that it freezes."""

    def unused(key: str) -> bool:
        if key.startswith(OPTIMIZER):
            frozen = optimizer is not None and optimizer.freezes(_parameter_of(key))
            return not load_optimizer or frozen or _is_optional(key)
        if key.endswith(HISTORY):
            return True
        name = key.removeprefix(MODEL)
        return load_optimizer and optimizer_key(MAIN_PARAM, name) in checkpoint.tensors

    return unused


def _load_counters(checkpoint: Checkpoint, optimizer: DistributedOptimizer) -> None:
    """Adam's count of updates, and the loss scale where both the checkpoint and the run have a dynamic one."""
    saved = checkpoint.payload["optimizer"]
    optimizer.step_count = saved["step_count"]
    if saved["loss_scaler"].keys() == optimizer.scaler.state_dict().keys():
        optimizer.scaler.load_state_dict(saved["loss_scaler"])


def saved_progress(values: dict[str, Any]) -> Progress:
    """The progress in a checkpoint's JSON; fields it does not know take their default. A schedule without a separate
    position followed consumed samples."""
    known = {each.name: values[each.name] for each in fields(Progress) if each.name in values}
    known.setdefault("scheduled_samples", values["consumed_samples"])
    known["running_means"] = tuple(known.get("running_means", ()))
    known["origin"] = known["origin"] if isinstance(known.get("origin"), dict) else {}
    return Progress(**known | {"past_batches": past_batches(values)})
