"""What tests share: forked gloo worlds, training runs in them, and the context of single layers."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.parallel_state import ParallelState
from megatron.core.tensor_parallel.layers import ExpertAxes, TPContext
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue
from megatron.testing.local_run import local_run
from megatron.testing.local_world import run_world
from megatron.testing.snapshot import Snapshot, train_in_world

__all__ = ["Snapshot", "local_run", "run_world", "tp_context", "train_in_world"]


def tp_context(
    state: ParallelState, sequence_parallel: bool = False, dtype: torch.dtype = torch.float64, **more: Any
) -> TPContext:
    """What a layer on the CPU is built with, in the layout `state`; `more` are other fields of `TPContext`."""
    more.setdefault("queue", WeightGradQueue())
    more.setdefault("experts", ExpertAxes.of(state))
    return TPContext(state.tp, sequence_parallel, dtype, torch.device("cpu"), **more)
