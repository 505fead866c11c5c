"""Shared test helpers: forked gloo worlds, training runs in these worlds, and contexts for single layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel.layers import TPContext
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import Snapshot, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve_legal
from megatron.training.run import TrainingRun
from megatron.training.tasks import start_run
from megatron.training.training import train

__all__ = ["Snapshot", "local_run", "run_world", "running", "tp_context", "train_in_world", "train_to_the_end"]


def running(argv: Sequence[str], rank: int, world_size: int) -> AbstractContextManager[TrainingRun]:
    """Return the context manager `local_run` for a command line, which must be valid."""
    return local_run(resolve_legal(parse_args(argv), world_size), rank, world_size)


def train_to_the_end(
    rank: int, world_size: int, argv: Sequence[str], prepare: Callable[[TrainingRun], object] = lambda run: None
) -> None:
    """Train on one rank as `pretrain_gpt.py` does. `prepare` is called with the run before training."""
    with ExitStack() as resources:
        run = resources.enter_context(running(argv, rank, world_size))
        prepare(run)
        start_run(run, resources)
        train(run)


def plant_nan(run: TrainingRun, iteration: int) -> None:
    """Set the gradients of the final norm to NaN in the step after iteration `iteration` only."""
    progress = run.progress
    for model in run.stages.values():
        for name, (param, _) in model.named_metas().items():
            if name == "decoder.final_layernorm.weight":
                param.register_hook(lambda grad: grad * math.nan if progress.iteration == iteration else grad)


def tp_context(
    state: ParallelState, sequence_parallel: bool = False, dtype: torch.dtype = torch.float64, **more: Any
) -> TPContext:
    """Return a `TPContext` for building a layer on the CPU under the layout `state`. Further keyword arguments set
    other fields of the context."""
    more.setdefault("queue", WeightGradQueue())
    return TPContext(state, sequence_parallel, dtype, torch.device("cpu"), **more)
