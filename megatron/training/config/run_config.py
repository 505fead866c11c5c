"""Configuration of a training run: batches, length, checks, logging, checkpoints, and the library's sections.

`RunConfig` contains all configuration sections. `megatron.training.config.arguments` converts a `RunConfig` to
command-line flags and back. This module does not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePath
from typing import Any

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.config.flag_spec import Section, flag
from megatron.core.config.model import TransformerConfig
from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.parallel import DDPConfig, ModelParallelConfig
from megatron.core.dist_checkpointing.file_storage import located
from megatron.training.metrics.log_formats import LOG_FORMATS

Point = tuple[int, int]
"""Position in a run: (iterations, consumed samples)."""


@dataclass(frozen=True)
class TrainingConfig:
    """Batch size and training length."""

    micro_batch_size: int = flag(1, first_run=True)
    """Samples in one forward pass of one model replica."""

    global_batch_size: int | None = flag(None, first_run=True)
    """Samples in one optimizer step; default: micro-batch-size * data-parallel size."""

    decrease_batch_size_if_needed: bool = False
    """Round global-batch-size down to a multiple of micro-batch-size * data-parallel size."""

    num_microbatches: int | None = None
    """Micro-batches per optimizer step and replica. By default, global-batch-size / (micro-batch-size * dp); a
    different value is an error."""

    train_iters: int | None = flag(None, first_run=True)
    """Number of iterations to train. If the batch size varies, this and all other durations in iterations are converted
    to samples."""

    train_samples: int | None = flag(None, first_run=True, same_setting_as="train_iters")
    """Samples to train, instead of train-iters."""

    train_tokens: int | None = flag(None, same_setting_as="train_iters")
    """Tokens to train, instead of train-iters. If another length is also given, the shorter length applies. Without any
    length, the run trains one epoch."""

    seed: int = flag(1234, at_least=0, at_most=2**32 - 1)
    """Seed of initial weights, dropout and data order."""

    exit_interval: int | None = flag(None, at_least=0)
    """Save and exit when the iteration is a multiple of this number; 0 for never."""

    exit_duration_in_mins: float | None = flag(None, at_least=0)
    """Save and exit after this many minutes."""

    exit_signal_handler: bool = True
    """Save and exit on SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 on any rank; a second signal exits at once."""

    exit_margin_in_mins: float = flag(3.0, at_least=0)
    """Save and exit this many minutes before the end of the SLURM job."""

    skip_train: bool = False
    """Do not train: evaluate the checkpoint in --load on the validation and test sets, and exit."""

    eval_interval: int = flag(1000, first_run=True)
    """Iterations between evaluations on the validation set."""

    eval_iters: int = flag(100, at_least=0, first_run=True)
    """Global batches in one evaluation; 0 turns evaluation off."""

    full_validation: bool = flag(False, needs="--eval-iters above 0; raise it")
    """Evaluate each whole validation set, regardless of --eval-iters."""

    eval_global_batch_size: int | None = None
    """Samples in one evaluation step; default: global-batch-size."""

    manual_gc: bool = False
    """Run Python's garbage collection only between steps, at the same steps on all ranks, instead of at allocation
    thresholds."""

    manual_gc_interval: int = flag(0, no_effect_without="--manual-gc")
    """--manual-gc: steps between collections; 0 turns collections between steps off."""

    manual_gc_eval: bool = flag(True, name="--no-manual-gc-eval", no_effect_without="--manual-gc")
    """--manual-gc: do not collect garbage before and after each evaluation."""

    deterministic: bool = flag(False, "--deterministic-mode")
    """Use deterministic kernels only; an operation without one is an error."""

    @property
    def eval_batch_size(self) -> int:
        """Number of samples in one evaluation step."""
        size = self.eval_global_batch_size or self.global_batch_size
        assert size is not None, "resolve() fills the global batch size"
        return size


@dataclass(frozen=True)
class ChecksConfig:
    """Policy for NaN, Inf and spiking steps: skip, report or abort."""

    check_for_nan_in_loss_and_grad: bool = flag(True, "--check-for-nan", skips_steps=True)
    """End the run at a NaN or infinite loss or gradient, report the module and samples, and save the step in SAVE/nan.
    If off, the run skips and counts steps with NaN or infinite values."""

    max_skipped_iterations: int = 0
    """Maximum number of iterations that the run may skip because of NaN, Inf or a reported spike. The run ends if it
    has to skip another iteration."""

    iterations_to_skip: tuple[int, ...] | None = flag(None, many=True)
    """Iterations whose samples are skipped without training. Iterations are numbered from 1, as in the log."""


@dataclass(frozen=True)
class LoggingConfig:
    """Configuration of logs: format, interval and files."""

    log_interval: int = flag(100, first_run=True)
    """Iterations between progress lines."""

    log_format: str = flag("default", choices=LOG_FORMATS)
    """Format of console lines about progress, validation and saving: this program's format, or Megatron-LM's for
    scripts that parse Megatron-LM's logs."""

    metrics_file: str | None = flag(None, path="stored", writes="file")
    """File for metrics, one JSON object per line; default: metrics.jsonl in --save, or in the current folder without
    --save."""

    peak_tflops: float | None = None
    """Peak TFLOP/s of a device, for MFU; default: derived from the device name, unknown on CPU."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints: saving and loading."""

    save: str | None = flag(None, path="stored", writes="folder", first_run=True)
    """Folder for checkpoints, metrics and the resolved configuration."""

    load: str | None = flag(None, path="stored", first_run=True)
    """Folder from which the latest checkpoint is loaded. Training starts from scratch if the folder contains no
    checkpoint, or if it is --save and does not exist yet. A Hugging Face folder is also accepted: its configuration and
    weights are loaded."""

    save_interval: int | None = flag(None, "--persistent-save-interval", at_least=0, first_run=True)
    """Iterations between checkpoints; 0 for none. With --save, the run also writes a checkpoint when it ends."""

    load_optim: bool = flag(True, name="--no-load-optim")
    """Do not load optimizer state."""

    load_rng: bool = flag(True, name="--no-load-rng")
    """Do not load random-number state."""

    finetune: bool = flag(False, no_effect_without="--load")
    """Load only the weights, and start at iteration 0 with a fresh optimizer, schedule and data order."""

    reset_iteration: bool = flag(False, no_effect_without="--load")
    """Load weights and optimizer state, and start at iteration 0 with a fresh schedule and data order."""

    load_lr_state: bool = flag(True, name="--no-load-lr-state")
    """Do not load the position of the learning-rate and weight-decay schedules; they restart."""

    async_save: bool = True
    """Write checkpoints in the background; training waits only for the copy to host memory."""

    fatal_save_errors: bool = flag(False, no_effect_without="--save")
    """Stop if a checkpoint cannot be saved after retries; default: continue training."""

    override_data_fingerprint: bool = flag(False, no_effect_without="--load")
    """Resume from a checkpoint that was saved with other training data."""

    use_checkpoint_args: bool = False
    """Take the model flags from the checkpoint in --load, if there is one. Also take the tokenizer, unless flags select
    one."""

    use_checkpoint_opt_param_scheduler: bool = flag(False, name="--use-checkpoint-opt_param-scheduler")
    """Take the learning rate, the weight decay and their schedules from the checkpoint in --load, if there is one."""

    save_optim: bool = flag(True, name="--no-save-optim")
    """Do not save optimizer state."""

    exit_on_missing_checkpoint: bool = flag(False, no_effect_without="--load")
    """Exit with an error if --load contains no checkpoint."""

    allow_missing_checkpoint: bool = flag(
        False, no_effect_without="--load", excludes="--exit-on-missing-checkpoint: the two flags contradict each other"
    )
    """Start from scratch if --load does not exist, even if it is not --save."""

    @property
    def save_root(self) -> PurePath | None:
        """Path of --save, on disk or in object storage."""
        return None if self.save is None else located(self.save)

    @property
    def save_folder(self) -> Path | None:
        """Path of --save if it is in a mounted file system, or None if it is in another storage."""
        root = self.save_root
        return root if isinstance(root, Path) else None

    @property
    def load_root(self) -> PurePath | None:
        """Path that --load names, on disk or in another storage, or None without --load."""
        return None if self.load is None else located(self.load)

    @property
    def may_be_missing(self) -> bool:
        """True if the --load folder does not have to exist. For example, the --load folder does not exist yet at the
        first start of a run with equal --load and --save."""
        if self.load is None or self.allow_missing_checkpoint:
            return True
        return self.save is not None and os.path.realpath(self.load) == os.path.realpath(self.save)

    @property
    def anew(self) -> bool:
        """True if the run starts at iteration 0, even if it loads a checkpoint."""
        return self.finetune or self.reset_iteration


@dataclass(frozen=True)
class ExtensionConfig:
    """Extensions written by users."""

    extension: tuple[str, ...] | None = flag(None, repeats=True, path="local")
    """Python file, or package.module, that registers custom components and flags; may be given more than once."""


@dataclass(frozen=True)
class RunConfig(Section):
    """Complete configuration of a run, as given by its command line. All sections share the `extension_options` of this
    object."""

    parallel: ModelParallelConfig = field(default_factory=ModelParallelConfig)
    model: TransformerConfig = field(default_factory=TransformerConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ddp: DDPConfig = field(default_factory=DDPConfig)
    data: DatasetConfig = field(default_factory=DatasetConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    extensions: ExtensionConfig = field(default_factory=ExtensionConfig)

    given: tuple[tuple[str, Any], ...] = field(default=(), compare=False, metadata={"flag": None})
    """Original values of the fields that `resolve` has replaced with derived values."""

    past_batches: tuple[Point, ...] = field(default=(), metadata={"flag": None})
    """Positions of earlier batch-size changes, followed by the position at which this run resumes. For a new run, the
    tuple is empty."""

    @property
    def restarts_positions(self) -> bool:
        """True if positions restart at each document, so that position ids differ between samples. For models without a
        position table, --reset-position-ids does not matter. A rotary embedding depends only on distances between
        tokens, which do not change when positions restart."""
        return self.data.reset_position_ids and self.model.position_table

    def __post_init__(self) -> None:
        for each in fields(self):
            section = getattr(self, each.name)
            if isinstance(section, Section) and section.extension_options != self.extension_options:
                object.__setattr__(self, each.name, replace(section, extension_options=self.extension_options))
