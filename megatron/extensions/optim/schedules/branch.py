"""Decayed branches. A branch is a run that starts from a checkpoint of another run and decays the learning rate. In all
other respects, a branch is an ordinary run. The schedule of a branch keeps the learning rate of the checkpoint until
the start of the branch, and then decays it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.file_storage import located, resolved
from megatron.core.dist_checkpointing.path_kind import candidates, is_checkpoint, saved_folders
from megatron.extensions.optim.schedules.flags import OTHERS, STYLE, BranchFlags, ScheduleFlags, is_source
from megatron.training.config.flags import StandInError, config_of_sections, named_value, with_named
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata, with_past_batches
from megatron.training.hooks import Callback, RunView
from megatron.training.plan import plan_of

FIELDS = (
    *("train_samples", "train_iters", "train_tokens", "lr", "lr_schedule", "lr_decay_style", *OTHERS),
    *("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"),
)
"""Configuration fields that a branch sets."""


def with_branch(config: RunConfig) -> RunConfig:
    """Return the configuration of a branch, or `config` itself if --branch-from is not set. The branch loads its latest
    checkpoint in --save. If there is none yet, the branch loads the checkpoint --branch-from. Raise StandInError if the
    checkpoint does not permit the branch.
    """
    options, save = config.options(BranchFlags), config.checkpoint.save
    if options.branch_from is None:
        return config
    if options.decay_tokens is None or save is None or is_source(save, options.branch_from):
        # The flag rules report why the branch cannot start.
        return _with_any_length(config, options)
    try:
        own = _saved(save)
        load = options.branch_from if own is None else save
        values = _values(config, options) if own is None else _values_of(own, save, options)
    except ValueError as error:
        raise StandInError(str(error), _with_any_length(config, options)) from error
    config = replace(config, checkpoint=replace(config.checkpoint, load=load))
    return with_past_batches(with_named(config, values))


def _with_any_length(config: RunConfig, options: BranchFlags) -> RunConfig:
    """Set an arbitrary schedule length for a branch that cannot start. Without a schedule length, other flag rules
    would report a second error with the same cause."""
    values = _of_branch(config, _samples(config, max(1, options.decay_tokens or 1)), None)
    return with_named(config, values | {"lr_decay_style": config.optimizer.lr_decay_style})


def _saved(save: str) -> dict[str, Any] | None:
    """Return the metadata of the branch's latest checkpoint in `save`; None if there is no checkpoint."""
    root = located(save)
    return saved_metadata(root) if candidates(root).folders else None


def _values_of(saved: dict[str, Any], save: str, options: BranchFlags) -> dict[str, object]:
    """Return the values of `FIELDS` with which a branch resumes from its own checkpoint. `saved` is the metadata of
    this checkpoint. Raise ValueError if the checkpoint is not the checkpoint of a branch, or if the branch flags differ
    from the flags with which the branch started."""
    sections = saved["config"] | {"model": saved["config"]["model"] | saved.get("model_of_run", {})}
    config = config_of_sections(sections)
    before = config.options(BranchFlags)
    if before.branch_from is None:
        raise ValueError(f"--save {save}: contains checkpoints of a run that is not a branch; use a different folder")
    for name in ("decay_tokens", "decay_shape"):
        was, now = getattr(before, name), getattr(options, name)
        if was != now:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{flag} {now}: the branch in --save began with {was}; use the same value, or a different --save"
            )
    origin, given = saved.get("callbacks", {}).get("branch"), options.branch_from
    if isinstance(origin, dict) and given is not None and not _is_origin(origin, given):
        begun = f"the branch in --save {save} began from {origin['from']}, at iteration {origin['iteration']}"
        raise ValueError(f"--branch-from {given}: {begun}; use the same value, or a different --save")
    return {name: named_value(config, name) for name in FIELDS}


def _is_origin(origin: dict[str, Any], given: str) -> bool:
    """Return True if `given`, the value of --branch-from, is the checkpoint from which a branch started, or the folder
    of the run that saved this checkpoint. A checkpoint that was moved is recognized by its iteration number and its
    number of consumed samples.
    """
    was, now = located(str(origin["from"])), located(given)
    if resolved(now) in (resolved(was), resolved(was).parent):
        return True
    iteration = origin["iteration"]
    folder = now if is_checkpoint(now) else saved_folders(now).get(iteration)
    if folder is None or is_checkpoint(was):
        return False
    there = saved_metadata(folder) or {}
    return all(there.get(key) == origin[key] for key in ("iteration", "consumed_samples"))


def _values(config: RunConfig, options: BranchFlags) -> dict[str, object]:
    """Return the values of `FIELDS` for a new branch, which has not saved a checkpoint yet. Raise ValueError if the
    branch cannot start from --branch-from."""
    where = f"--branch-from {options.branch_from}"
    assert options.branch_from is not None and options.decay_tokens is not None
    metadata = saved_metadata(located(options.branch_from))
    if metadata is None:
        raise ValueError(f"{where}: contains no checkpoint; pass a checkpoint, or the --save folder of a run")
    begun = int(metadata["consumed_samples"])
    if begun == 0:
        raise ValueError(f"{where}: this checkpoint was saved before the first training step; pass a later checkpoint")
    samples = _samples(config, options.decay_tokens)
    factor = _rate(metadata) / (config.optimizer.lr or 1.0)
    text = f"linear 0% to {factor!r}, hold rest, {options.decay_shape} {samples} samples"
    return _of_branch(config, begun + samples, text)


def _samples(config: RunConfig, tokens: int) -> int:
    """Convert a number of tokens to a number of samples. If the batch size is known, the result is rounded up to a
    multiple of the batch size."""
    samples, size = -(-tokens // max(1, config.model.seq_length)), config.training.global_batch_size
    return samples if not size or size < 0 else -(-samples // size) * size


def _of_branch(config: RunConfig, train_samples: int, schedule: str | None) -> dict[str, object]:
    values: dict[str, object] = dict.fromkeys(FIELDS)
    values |= {"lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr": config.optimizer.lr}
    return values | {"train_samples": train_samples, "lr_schedule": schedule, "lr_decay_style": STYLE}


def _rate(metadata: dict[str, Any]) -> float:
    """Return the learning rate that the original run uses for the first update after the checkpoint."""
    config, consumed = config_of_sections(metadata["config"]), int(metadata["consumed_samples"])
    plan = plan_of(config)
    phase = plan.at(consumed)
    scheduler = plan.schedule_of(phase) if hasattr(plan, "schedule_of") else plan.schedule()
    return float(scheduler.lr_at(int(metadata.get("scheduled_samples", consumed))))


class BranchOrigin(Callback):
    """Callback that records the origin of a branch in each checkpoint of the branch. The origin is the checkpoint from
    which the branch started."""

    to_continue = "start another branch with a larger --decay-tokens and a different --save"

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.origin: dict[str, object] = {}
        self.before: object = None
        """State of this callback in the loaded checkpoint; None if the checkpoint contains no such state."""

    def on_start(self, run: RunView) -> None:
        folder = located(run.progress.loaded_from or "")
        if folder.parent == self.config.checkpoint.save_root and isinstance(self.before, dict):
            self.origin = self.before
            return
        parent = {} if self.before is None else {"parent": self.before}
        at = {"iteration": run.progress.iteration, "consumed_samples": run.progress.consumed_samples}
        self.origin = {"from": str(resolved(folder)), **at, **parent}
        samples = (self.config.training.train_samples or 0) - run.progress.consumed_samples
        text = self.config.options(ScheduleFlags).lr_schedule
        run.say(f" branch of {folder}: {text}; {samples * self.config.model.seq_length:,} tokens to its end")

    def state(self) -> dict[str, object]:
        return self.origin

    def load_state(self, state: object) -> None:
        self.before = state
