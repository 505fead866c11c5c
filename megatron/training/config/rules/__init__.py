"""Validation rules. Each rule is a generator function that yields the problems that it finds in a `RunConfig`, after
defaults have been filled in for the given world size.

Every rule is applied to arbitrary values and must not raise exceptions. A rule that requires positive numbers first
checks that the numbers are positive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.training.config.problem import Problem
from megatron.training.config.rules import data, model, moe, parallel, pipeline, training
from megatron.training.config.run_config import RunConfig

Rule = Callable[[RunConfig, int], Iterator[Problem]]

RULES: tuple[Rule, ...] = (
    *(parallel.world, model.attention, model.norms, model.tensor_parallel),
    *(parallel.sequence, parallel.context),
    *(
        model.positions,
        model.residual_streams,
        model.layers,
        model.yarn,
        model.mixers,
        model.linear_attention,
        moe.experts,
        model.multi_token,
    ),
    *(pipeline.pipeline, pipeline.recomputation, pipeline.loss_chunks, pipeline.overlap, pipeline.sharding),
    *(parallel.precision, training.batch, training.length, training.schedule),
    training.skipped_steps,
    *(data.data, data.validation_sets, data.tokenizer),
)
