"""A decayed branch: a run that continues a checkpoint of another run, with a learning rate that falls to its end.

The branch is an ordinary run with a schedule of two pieces, `hold rest to the rate of the checkpoint` and the decay.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import Any

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import candidates
from megatron.extensions.optim.schedules.flags import OTHERS, STYLE, BranchFlags, ScheduleFlags
from megatron.training.config.flags import config_of_sections, named_value, with_named
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata, saved_sections, with_past_batches
from megatron.training.hooks import Callback, RunView
from megatron.training.plan import plan_of

FIELDS = (
    *("train_samples", "train_iters", "train_tokens", "lr", "lr_schedule", "lr_decay_style", *OTHERS),
    *("lr_decay_iters", "lr_decay_samples", "lr_decay_tokens"),
)
"""Fields that make a run a branch."""


def with_branch(config: RunConfig) -> RunConfig:
    """The configuration that loads --branch-from, or, once the branch has a checkpoint, that one, and decays. Raises
    ValueError."""
    options, save = config.options(BranchFlags), config.checkpoint.save
    if options.branch_from is None or options.decay_tokens is None or save is None:
        return config  # the rules say what is missing
    own = _saved(save)
    load = options.branch_from if own is None else save
    values = _values(config, options) if own is None else _values_of(own, options)
    config = replace(config, checkpoint=replace(config.checkpoint, load=load))
    return with_past_batches(with_named(config, values))


def _saved(save: str) -> RunConfig | None:
    """The configuration of the branch's latest checkpoint."""
    root = located(save)
    sections = saved_sections(root) if candidates(root).folders else None
    return None if sections is None else config_of_sections(sections)


def _values_of(saved: RunConfig, options: BranchFlags) -> dict[str, object]:
    before = saved.options(BranchFlags)
    for name in ("decay_tokens", "decay_shape"):
        was, now = getattr(before, name), getattr(options, name)
        if was != now:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} {now}: the branch in --save has begun with {was}; give that, or another --save")
    return {name: named_value(saved, name) for name in FIELDS}


def _values(config: RunConfig, options: BranchFlags) -> dict[str, object]:
    """Length and schedule of a branch that begins."""
    where = f"--branch-from {options.branch_from}"
    assert options.branch_from is not None and options.decay_tokens is not None
    metadata = saved_metadata(located(options.branch_from))
    if metadata is None:
        raise ValueError(f"{where}: holds no checkpoint; give a checkpoint, or the --save of a run")
    begun, size = int(metadata["consumed_samples"]), config.training.global_batch_size
    if begun == 0:
        raise ValueError(f"{where}: its run has trained nothing; give a later checkpoint")
    samples = -(-options.decay_tokens // max(1, config.model.seq_length))
    samples = samples if not size or size < 0 else -(-samples // size) * size
    factor = _rate(metadata) / (config.optimizer.lr or 1.0)
    text = f"linear 0% to {factor!r}, hold rest, {options.decay_shape} {samples} samples"
    values: dict[str, object] = dict.fromkeys(FIELDS)
    values |= {"lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr": config.optimizer.lr}
    return values | {"train_samples": begun + samples, "lr_schedule": text, "lr_decay_style": STYLE}


def _rate(metadata: dict[str, Any]) -> float:
    """The learning rate of the update that would have followed the checkpoint."""
    config, consumed = config_of_sections(metadata["config"]), int(metadata["consumed_samples"])
    plan = plan_of(config)
    phase = plan.at(consumed)
    scheduler = plan.schedule_of(phase) if hasattr(plan, "schedule_of") else plan.schedule()
    return float(scheduler.lr_at(int(metadata.get("scheduled_samples", consumed))))


class BranchOrigin(Callback):
    """Keeps in the branch's checkpoints which checkpoint it began from."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.origin: dict[str, object] = {}
        self.before: object = None
        """The state in the checkpoint that was loaded."""

    def on_start(self, run: RunView) -> None:
        folder = PurePath(run.progress.loaded_from or "")
        if folder.parent == self.config.checkpoint.save_root and isinstance(self.before, dict):
            self.origin = self.before
            return
        parent = {} if self.before is None else {"parent": self.before}
        at = {"iteration": run.progress.iteration, "consumed_samples": run.progress.consumed_samples}
        self.origin = {"from": str(folder), **at, **parent}
        options = self.config.options(BranchFlags)
        run.say(
            f" branch of {folder}: {self.config.options(ScheduleFlags).lr_schedule}; "
            f"{options.decay_tokens:,} tokens to its end"
        )

    def state(self) -> dict[str, object]:
        return self.origin

    def load_state(self, state: object) -> None:
        self.before = state
