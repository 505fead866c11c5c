"""Validation rules: each is a generator of problems over a resolved `RunConfig` and a world size.

All rules run on any values, so a rule must not raise. A rule that needs positive numbers checks for them first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.training.config.problem import Problem
from megatron.training.config.rules.data import data, tokenizer, validation_sets
from megatron.training.config.rules.model import (
    attention,
    attention_kernel,
    layers,
    linear_attention,
    mixers,
    multi_token,
    positions,
    tensor_parallel,
    yarn,
)
from megatron.training.config.rules.moe import experts
from megatron.training.config.rules.parallel import heads_over_context, precision, sequence, world
from megatron.training.config.rules.pipeline import overlap, pipeline, recomputation, sharding
from megatron.training.config.rules.training import batch, checkpoints, length, schedule
from megatron.training.config.run_config import RunConfig

Rule = Callable[[RunConfig, int], Iterator[Problem]]


RULES: tuple[Rule, ...] = (
    world,
    attention,
    attention_kernel,
    tensor_parallel,
    sequence,
    heads_over_context,
    positions,
    layers,
    yarn,
    mixers,
    linear_attention,
    experts,
    multi_token,
    pipeline,
    recomputation,
    overlap,
    sharding,
    precision,
    batch,
    length,
    schedule,
    data,
    validation_sets,
    tokenizer,
    checkpoints,
)
