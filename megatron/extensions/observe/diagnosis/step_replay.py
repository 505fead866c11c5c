"""Replay of a saved step under any layout (`tools/replay_step.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from math import lcm
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.config.parallel import ModelParallelConfig, PrecisionConfig
from megatron.core.datasets.gpt_dataset import DividesDocuments
from megatron.core.datasets.samplers import DataIterator
from megatron.core.parallel_state import ParallelState
from megatron.extensions.observe.diagnosis.nonfinite_search import Finding, search
from megatron.extensions.observe.diagnosis.step_dump import CONFIG, SavedSamples, SavedStep
from megatron.testing.local_world import run_world
from megatron.training.config.arguments import parse_args, save_config
from megatron.training.config.flags import EXTENSION_SECTIONS
from megatron.training.config.run_config import CheckpointConfig, ChecksConfig, LoggingConfig, RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.data import DealsSamples, WrapsDatasets
from megatron.training.extensions import CALLBACKS
from megatron.training.initialize import Runtime, choose_device, local_runtime, set_determinism
from megatron.training.reliability.launch import Launch
from megatron.training.run import TrainingRun
from megatron.training.setup import build_run

Prepare = Callable[[TrainingRun], None]
"""Function that is called with the run on every rank before the step runs, for example to add hooks."""


def replay(
    folder: Path, flags: Sequence[str] = (), world_size: int | None = None, prepare: Prepare | None = None
) -> Finding | None:
    """Run a saved step again and return the first non-finite value; None if all values are finite.

    Args:
        folder: Folder of the saved step.
        flags: Flags that select the parallel layout of the replay.
        world_size: Number of ranks to run on this machine's CPU. Default: the smallest number that the layout in
            `flags` allows, which is 1 if `flags` contains no layout.
        prepare: Function that is called with the run before the step runs.

    Raises:
        ValueError: The flags are invalid, or the folder contains no saved step. The message lists every problem.
    """
    saved, config = SavedStep.read(folder), config_of(folder, flags)
    parallel = config.parallel
    ranks = world_size or lcm(
        parallel.model_parallel_size,
        parallel.pipeline_model_parallel_size * parallel.expert_model_parallel_size * parallel.expert_tp,
    )
    config = resolve_legal(config, ranks)
    if ranks == 1:
        return _replay_on_rank(0, 1, config, folder, saved, prepare)
    return run_world(ranks, _replay_on_rank, config, folder, saved, prepare, timeout=3600.0)[0]


def config_of(folder: Path, flags: Sequence[str]) -> RunConfig:
    """Return the configuration for replaying a step, before defaults are filled in. The configuration consists of the
    run's configuration and `flags`. The run's parallel layout is dropped, but its precision settings are kept. Raises
    ValueError if a flag is invalid.
    """
    config = parse_args(["--config", str(folder / CONFIG)])
    precision = [each.name for each in fields(PrecisionConfig)]
    kept = {name: getattr(config.parallel, name) for name in (*precision, "cpu")}
    config = replace(
        config,
        parallel=ModelParallelConfig(**kept),
        data=DatasetConfig(mock_data=True, num_workers=0),  # placeholder: the replay reads the saved samples
        tokenizer=TokenizerConfig(),
        training=replace(config.training, eval_iters=0, num_microbatches=None),
        checks=ChecksConfig(),
        logging=LoggingConfig(),
        checkpoint=CheckpointConfig(load=str(folder), load_optim=False, override_data_fingerprint=True),
    )
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / CONFIG
        save_config(without_callbacks(without_data_flags(config)), path)
        return parse_args(["--config", str(path), *flags])


def without_data_flags(config: RunConfig) -> RunConfig:
    """Return a copy of `config` in which all flags that create, change or distribute samples have their default values.
    A replay uses the saved samples instead."""
    for options in config.extension_options:
        if isinstance(options, DividesDocuments | DealsSamples | WrapsDatasets):
            config = config.with_options(type(options)())
    return config


def without_callbacks(config: RunConfig) -> RunConfig:
    """Return a copy of `config` in which the flags that enable callbacks have their default values. A replay lacks the
    inputs that callbacks need. Flags that belong to the model are kept, even if they also enable a callback."""
    asked = [facts.when for facts in map(CALLBACKS.facts, CALLBACKS) if facts.when(config)]
    of_model = {section.cls for section in EXTENSION_SECTIONS.values() if section.part_of == "model"}
    for options in (options for options in config.extension_options if type(options) not in of_model):
        without = config.with_options(type(options)())
        if not all(when(without) for when in asked):
            config = without
            asked = [when for when in asked if when(config)]
    return config


def _replay_on_rank(
    rank: int, world_size: int, config: RunConfig, folder: Path, saved: SavedStep, prepare: Prepare | None
) -> Finding | None:
    set_determinism(config)
    if world_size == 1:
        runtime = Runtime(Launch(), choose_device(config.parallel, Launch()), ParallelState())
    else:
        runtime = local_runtime(config, rank, world_size)
    run = build_run(config, runtime)
    run.data.close()
    dp, micro_batch_size = runtime.state.dp, config.training.micro_batch_size
    samples = SavedSamples(folder, parse_args(["--config", str(folder / CONFIG)]).training.micro_batch_size)
    run.data.train = DataIterator(
        samples, micro_batch_size=micro_batch_size, dp_rank=dp.rank, dp_size=dp.size, name="saved"
    )
    run.data.train.deal = samples.deal
    if prepare is not None:
        prepare(run)
    return search(run.forward_backward, saved.step, run.data.read_batches(saved.step), saved.loss_scale)
