"""Mutants of the pipeline, and of what it shares between stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.gpt.multi_token import MultiTokenPrediction
from megatron.core.pipeline_parallel import executor
from megatron.core.tensor_parallel import weight_grad
from tests.parity.mutants.common import mutant, nothing, plant


@mutant(executor.PipelineExecutor, "_begin", world="2", pp="2")
def _reversed_on_last_stage(self: Any, batches: Any, *more: Any, **named: Any) -> None:
    """Last stage takes micro-batches in another order.

    The last stage pairs hidden states with the labels of another micro-batch."""
    _true_begin(self, list(reversed(batches)) if self.pp.size > 1 and self.pp.last else batches, *more, **named)


_true_begin = executor.PipelineExecutor._begin


@mutant(Batch, "with_future", multi_token="1")
def _labels_too_near(self: Batch, depths: int) -> Batch:
    """Labels of multi-token prediction shifted by one too few.

    Each depth of multi-token prediction is trained on the label of the depth before."""
    batch = _true_future(self, depths)
    assert batch.future_labels is not None
    nearer = torch.cat((self.labels[:, :, None], batch.future_labels[:, :, :-1]), dim=2)
    return replace(batch, future_labels=nearer)


@mutant(Batch, "with_future", multi_token="2")
def _last_tokens_count(self: Batch, depths: int) -> Batch:
    """Last tokens of multi-token prediction not masked.

    Tokens whose label lies beyond the sample count, with token 0 for it."""
    batch = _true_future(self, depths)
    assert batch.future_loss_mask is not None
    return replace(batch, future_loss_mask=torch.ones_like(batch.future_loss_mask))


_true_future = Batch.with_future


@mutant(MultiTokenPrediction, "forward", multi_token="2")
def _factor_twice(self: Any, *args: Any) -> Tensor:
    """Factor of multi-token prediction applied twice."""
    return self.weight * _true_prediction(self, *args)


_true_prediction = MultiTokenPrediction.forward


plant("Tied embeddings not summed over stages", (finalize, "_sum_shared_grads", nothing), world="2", pp="2")
plant(
    "Weight gradients left in the queue",
    (weight_grad.WeightGradQueue, "run", lambda self, key: self._jobs.pop(key)),
    world="2",
    pp="2",
    schedule="zb-h1",
)
plant(
    "The embedding's copy for multi-token prediction not summed over stages",
    (finalize, "_sum_shared_grads", nothing),
    world="2",
    pp="2",
    embeddings="untied",
    multi_token="1",
)
