"""Registers piecewise schedules and branches, and defines their flags and flag rules. This module does not import
torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.config.flag_spec import flag
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.optimizers import LR_SCHEDULES
from megatron.core.dist_checkpointing.file_storage import located, resolved
from megatron.extensions.optim.schedules.pieces import DECAYS, EXAMPLE, lengths, parse, without_tokens
from megatron.training.config.batch_size import legal_sizes, samples_of_run
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

STYLE = "pieces"
"""Value of --lr-decay-style that selects a piecewise schedule."""

REPLACED = (OptimizerConfig.lr_decay_style, "constant", STYLE)
"""Values of --lr-decay-style that --lr-schedule may replace: the default, the style of training phases without a
separate learning rate, and "pieces"."""

NOT_ROUNDED = 0.01
"""Tolerance for the rounding of lengths. A warning is printed if more than this fraction of a schedule is not covered
by pieces."""

OTHERS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_tokens", "lr_warmup_fraction")
"""Configuration fields for the warm-up. These fields must not be set together with --lr-schedule, because the warm-up
is a piece of the schedule."""


def reads(config: RunConfig) -> RunConfig:
    """Read --lr-schedule-file, and return a configuration with the pieces in the file as --lr-schedule. Raise
    ValueError if the file is not valid, or if --lr-schedule is different."""
    options = config.options(ScheduleFlags)
    if options.lr_schedule_file is None:
        return config
    try:
        text = Path(options.lr_schedule_file).read_text(encoding="utf-8")
        pieces = parse(text)
    except ValueError as error:
        rule = "is not UTF-8 text; use a text file of pieces" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"--lr-schedule-file {options.lr_schedule_file}: {rule}") from None
    text = ", ".join(map(str, pieces))
    if options.lr_schedule not in (None, text):
        rule = f"contains {text}, but --lr-schedule is {options.lr_schedule}; keep one of them"
        raise ValueError(f"--lr-schedule-file {options.lr_schedule_file}: {rule}")
    return config.with_options(ScheduleFlags(lr_schedule=text))


def resolve(config: RunConfig) -> RunConfig:
    """Return the configuration in the form that the optimizer uses: --lr-decay-style is `STYLE`, and the lengths in
    --lr-schedule are in samples."""
    options, optimizer = config.options(ScheduleFlags), config.optimizer
    if options.lr_schedule is None or optimizer.lr_decay_style not in REPLACED:
        return config
    try:
        text = without_tokens(options.lr_schedule, max(1, config.model.seq_length))
    except ValueError:
        # The flag rules (`rules`) report that the schedule is invalid.
        return config
    config = replace(config, optimizer=replace(optimizer, lr_decay_style=STYLE))
    return config.with_options(ScheduleFlags(lr_schedule=text))


def rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(ScheduleFlags)
    name, optimizer = "--lr-schedule", config.optimizer
    if own.lr_schedule is None:
        if optimizer.lr_decay_style == STYLE:
            yield Problem("--lr-decay-style", STYLE, "needs --lr-schedule", f"add it, {EXAMPLE}")
        return
    # Use the user's text, in which lengths may be in tokens.
    text = dict(config.given).get("lr_schedule") or own.lr_schedule
    if optimizer.lr_decay_style not in REPLACED:
        yield Problem.exclusive(name, text, f"--lr-decay-style {optimizer.lr_decay_style}")
    for field in OTHERS:
        if getattr(optimizer, field):
            flag_name, why = f"--{field.replace('_', '-')}", "warm-up is a piece of the schedule"
            yield Problem.exclusive(flag_name, getattr(optimizer, field), name, why)
    try:
        pieces = parse(without_tokens(own.lr_schedule, max(1, config.model.seq_length)))
        if (total := _length(config)) is not None:
            left = total - sum(lengths(pieces, total))
            if left > NOT_ROUNDED * total:
                rule = f"its pieces end {left:g} samples before the schedule's {total:g}, and the last rate is held"
                yield Problem(name, text, rule, "lengthen a piece, or add `hold rest`", harmless=True)
    except ValueError as error:
        rule, _, remedy = str(error).partition("; ")
        yield Problem(name, text, rule, remedy)


@extension_flags("schedules of pieces", may_change=True, reads=reads, resolve=resolve, rules=rules, always=True)
@dataclass(frozen=True)
class ScheduleFlags:
    """Flags for a piecewise learning rate schedule."""

    lr_schedule: str | None = None
    """Pieces of the learning rate schedule, separated by commas: `warm-up 1%, hold rest, 1-sqrt 20%`. A piece consists
    of a shape (warm-up, hold, linear, cosine, sqrt, 1-sqrt, power), a length (a percentage of the decay length, `2B
    tokens`, `5e6 samples`, or the `rest`), and `to F`, where F is the last rate of the piece as a factor of --lr. By
    default, a warm-up ends at --lr, and a decay ends at --min-lr. `power` needs `exponent E`, the exponent of the
    consumed samples. It also accepts `after LENGTH`, the position at which the decay starts."""

    lr_schedule_file: str | None = flag(None, path="local")
    """File that contains the value of --lr-schedule, with one piece per line. A # starts a comment. The run's
    configuration records the file's text instead of its name."""


def _length(config: RunConfig) -> int | None:
    """Return the length of the schedule in samples; None if the size of the dataset determines the length."""
    optimizer, training = config.optimizer, config.training
    iterations, samples = optimizer.lr_decay_iters or training.train_iters, samples_of_run(config)
    if training.train_iters is not None and iterations is not None:
        return legal_sizes(config).samples(iterations)
    return optimizer.lr_decay_samples or samples


def is_source(save: str, source: str) -> bool:
    """Return True if `save` is `source`, or the folder that contains the checkpoint `source`."""
    return resolved(located(save)) in (resolved(located(source)), resolved(located(source)).parent)


def rules_of_branch(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(BranchFlags)
    source, save = own.branch_from, config.checkpoint.save
    ramp = config.optimizer.weight_decay_incr_style
    if source is None:
        return
    if save is None:
        yield Problem("--branch-from", source, "needs --save", "add --save with a folder for the branch")
    elif is_source(save, source):
        yield Problem(
            "--save", save, f"is the folder of --branch-from {source}", "use a different folder for the branch"
        )
    if ramp != OptimizerConfig.weight_decay_incr_style:
        why = "a branch can continue only a constant weight decay"
        yield Problem.exclusive("--branch-from", source, f"--weight-decay-incr-style {ramp}", why)


@extension_flags("branches of a run", may_change=True, reads=f"{__package__}.branch:with_branch", rules=rules_of_branch)
@dataclass(frozen=True)
class BranchFlags:
    """Flags for a decayed branch of a run with a constant learning rate."""

    branch_from: str | None = flag(None, path="stored", needs="--decay-tokens")
    """Branch from this checkpoint of another run, or from the latest checkpoint if a folder of checkpoints is given.
    The branch continues with the same data order and optimizer states, saves to its own --save, decays the learning
    rate over --decay-tokens, and ends. The same command resumes the branch."""

    decay_tokens: int | None = flag(None, above=0, needs="--branch-from")
    """--branch-from: length of the branch in tokens, rounded up to whole steps."""

    decay_shape: str = flag("1-sqrt", choices=tuple(DECAYS), no_effect_without="--branch-from")
    """--branch-from: shape of the decay from the checkpoint's learning rate to --min-lr."""


LR_SCHEDULES.register(STYLE, f"{__package__}.rates:pieces")
CALLBACKS.register(
    "branch",
    f"{__package__}.branch:BranchOrigin",
    when=lambda config: config.options(BranchFlags).branch_from is not None,
)
