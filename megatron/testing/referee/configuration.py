"""Configuration with which the reference gradients are computed. The reference uses the model's own configuration.
Flags set the values that the model's configuration does not define."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.extensions.interop.conversion.formats import Source
from megatron.training.config.arguments import read_flags
from megatron.training.config.flags import field_table, with_named
from megatron.training.config.run_config import CheckpointConfig, ChecksConfig, LoggingConfig, RunConfig

OF_RUNS = ("parallel", "ddp", "checkpoint", "logging", "checks")
"""Configuration sections that do not affect the loss and gradients of this program in one process."""

OF_DATA = ("data", "training")
"""Configuration sections that only affect which samples are chosen from a data set."""


def with_flags(source: Source, flags: Sequence[str], takes_samples: bool) -> RunConfig:
    """Return a model's configuration, updated with `flags`, which are flags of pretrain_gpt.py.

    Args:
        source: The model.
        flags: Flags that select data, or that set values which the model's configuration does not define, such as loss
            coefficients.
        takes_samples: True if the samples are taken from a data set, False if a file contains the samples.

    Raises:
        ValueError: A flag is unknown, has no effect, or changes the model. The message lists every problem.
    """
    reader = read_flags(flags)
    reader.raise_problems()
    problems = []
    for field in reader.values:
        flag = field_table()[field]
        if flag.section in OF_RUNS:
            problems.append(f"{flag.name} after --: the reference runs one step in one process; leave it out")
        elif not takes_samples and (flag.section in OF_DATA or field == "seq_length"):
            remedy = "leave it out, or give --samples or --iteration in place of --batch or --step"
            problems.append(f"{flag.name} after --: the batch is given, so the flag has no effect; {remedy}")
    if problems:
        raise ValueError("\n".join(problems))
    return with_named(source.config, reader.values)


def check_same_model(source: Source, config: RunConfig) -> None:
    """Raise ValueError if flags have changed the names or shapes of the model's parameters, compared with the
    source."""
    ours = {meta.name: meta.global_shape for meta in stage_metas(config.model)}
    theirs = {name: meta.global_shape for name, meta in source.metas.items()}
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if names:
        shapes = f"{names[0]} has the shape {ours.get(names[0])}, and {theirs.get(names[0])} in --model"
        rule = f"would make another model: {len(names)} parameters differ ({shapes})"
        raise ValueError(f"flags after -- {rule}; leave out the flags that change the model's shapes")


def in_one_process(config: RunConfig, **parallel: bool) -> RunConfig:
    """Return a configuration for one process on the CPU. Output files and checks of the run are turned off. `parallel`
    contains fields to set in the `ModelParallelConfig`."""
    return replace(
        config,
        parallel=ModelParallelConfig(cpu=True, **parallel),  # type: ignore[arg-type]
        training=replace(config.training, micro_batch_size=1, num_microbatches=None, eval_iters=0),
        optimizer=replace(config.optimizer, lr=1e-3, min_lr=0.0),  # not used, but required by validation
        checkpoint=CheckpointConfig(),
        logging=LoggingConfig(),
        checks=ChecksConfig(),
    )
