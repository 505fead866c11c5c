"""Samples of a run's training data, chosen by number or by the step that trains on them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from megatron.core.parallel_state import ParallelState
from megatron.extensions.interop.conversion.dcp_format import DCPSource
from megatron.extensions.interop.conversion.formats import Source
from megatron.extensions.observe.diagnosis.step_replay import without_callbacks
from megatron.testing.referee.batch import Batch
from megatron.testing.referee.configuration import in_one_process
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.config.saved_flags import with_past_batches
from megatron.training.config.validation import names_data, resolve_legal
from megatron.training.data import TrainingData
from megatron.training.initialize import Runtime
from megatron.training.plan import RunPlan
from megatron.training.reliability.launch import Launch
from megatron.training.setup import planned_data

RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class Chosen(NamedTuple):
    """Selection of samples: either the samples with the given numbers, or all samples of one step."""

    samples: tuple[int, ...] = ()
    """Sample numbers, counted from 0 in the order in which the run consumes them."""

    iteration: int | None = None
    """Number of the step, counted from 1."""

    def __str__(self) -> str:
        return f"--iteration {self.iteration}" if self.iteration is not None else "--samples"


MOST = 100_000
"""Largest number of samples that a command line may select. A larger batch would not fit in memory anyway."""


def sample_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers and ranges such as `0-7,12`. Raises ValueError if the text has a different form."""
    found: list[int] = []
    for part in text.split(","):
        match = RANGE.fullmatch(part.strip())
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise ValueError(f"--samples {text}: {part!r} must be a number or a range, as in 0-7,12")
        named = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(found) + named.stop - named.start > MOST:
            raise ValueError(f"--samples {text}: names more than {MOST:,} samples; name the samples of one step")
        found += named
    if len(set(found)) != len(found):
        raise ValueError(f"--samples {text}: a sample is named twice; name each once")
    return tuple(found)


def batch_of_run(source: Source, config: RunConfig, chosen: Chosen) -> Batch:
    """Read samples of the training data. The model's configuration and the flags name these data.

    If the model comes from a run's checkpoint, the checkpoint also determines how many samples the run has consumed,
    and at which batch sizes. If flags name other data, the run's consumed samples are ignored. Raises ValueError if no
    data are named, if they cannot be read, or if they do not contain the chosen samples.
    """
    other = config.data != source.config.data
    config = in_one_process(without_callbacks(config))
    if not names_data(config):
        remedy = "add flags of its data after --, such as -- --data-path corpus --seq-length 4096 --train-iters 1000"
        raise ValueError(f"{chosen}: the configuration of --model names no training data; {remedy}")
    if isinstance(source, DCPSource) and not other:
        config = replace(config, checkpoint=CheckpointConfig(load=str(source.checkpoint.folder)))
        config = with_past_batches(config)
    config = resolve_legal(config, 1)
    data, plan = planned_data(config, Runtime(Launch(), torch.device("cpu"), ParallelState()))
    with closing(data):
        return _batch(data, numbers_of(chosen, plan))


def numbers_of(chosen: Chosen, plan: RunPlan) -> Sequence[int]:
    """Return the indices of the samples that `chosen` selects. Raises ValueError if the run does not contain the step
    or the samples."""
    if chosen.iteration is None:
        numbers: Sequence[int] = chosen.samples
        if max(numbers) >= plan.samples:
            rule = f"the run has samples 0 to {plan.samples - 1}"
            raise ValueError(f"--samples {max(numbers)}: {rule}; choose one of them, or add --train-iters after --")
        return numbers
    if not 1 <= chosen.iteration <= plan.iterations:
        raise ValueError(f"{chosen}: the run has steps 1 to {plan.iterations}; choose one of them")
    first = plan.sizes.samples(chosen.iteration - 1)
    return range(first, first + plan.sizes.at(first))


def _batch(data: TrainingData, numbers: Sequence[int]) -> Batch:
    samples = [data.train.dataset[number] for number in numbers]
    lengths = {len(tokens) for sample in samples if (tokens := sample["tokens"]) is not None}
    if len(lengths) != 1:
        raise ValueError(f"--samples have {min(lengths)} to {max(lengths)} tokens; choose samples of one phase")
    columns = {name: [part for sample in samples if (part := sample[name]) is not None] for name in samples[0]}
    return Batch.of_arrays({name: np.stack(parts) for name, parts in columns.items() if parts})
