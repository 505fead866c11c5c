"""Mutants of the pipeline, and of what it shares between stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.distributed import finalize_model_grads as finalize
from megatron.core.models.gpt.multi_token import MultiTokenPrediction
from megatron.core.optimizer import distrib_optimizer, post_validation
from megatron.core.pipeline_parallel import executor
from megatron.core.tensor_parallel import weight_grad
from tests.parity.matrix.combination import Combination
from tests.parity.mutants.common import Mutants, nothing


def _reversed_on_last_stage(self: Any, batches: Any, seed: Any, training: bool) -> None:
    """The last stage pairs hidden states with the labels of another micro-batch."""
    _true_begin(self, list(reversed(batches)) if self.pp.size > 1 and self.pp.last else batches, seed, training)


_true_begin = executor.PipelineExecutor._begin


def _labels_too_near(self: Batch, depths: int) -> Batch:
    """Each depth of multi-token prediction is trained on the label of the depth before."""
    batch = _true_future(self, depths)
    assert batch.future_labels is not None
    nearer = torch.cat((self.labels[:, :, None], batch.future_labels[:, :, :-1]), dim=2)
    return replace(batch, future_labels=nearer)


def _last_tokens_count(self: Batch, depths: int) -> Batch:
    """Tokens whose label lies beyond the sample count, with token 0 for it."""
    batch = _true_future(self, depths)
    assert batch.future_loss_mask is not None
    return replace(batch, future_loss_mask=torch.ones_like(batch.future_loss_mask))


_true_future = Batch.with_future


def _factor_twice(self: Any, *args: Any) -> Tensor:
    return self.weight * _true_prediction(self, *args)


_true_prediction = MultiTokenPrediction.forward


def _without_moments(self: Any) -> None:
    """Rolls main parameters and gradients back."""
    pairs = list(zip(self.tensors, self.copies, strict=True))
    for tensor, copy in [*pairs[::4], *pairs[3::4], *self._further]:
        tensor.copy_(copy)


def _without_gradients(self: Any) -> None:
    """Rolls main parameters and moments back; gradients are those that the next step has zeroed."""
    for i, (tensor, copy) in enumerate(zip(self.tensors, self.copies, strict=True)):
        if i % 4 < 3:
            tensor.copy_(copy)


def _keeps_forwards(self: Any, action: Any) -> None:
    """The forward passes of parameters that were rolled back stand."""
    self.validate()


def _unclipped(self: Any, update: Any, skip: Tensor, coefficient: Any) -> None:
    """A step that is made again is not clipped either."""
    _true_update(self, update, skip, None)


_true_update = distrib_optimizer.DistributedOptimizer._update
_LATER = Combination.of(world="2", pp="2", schedule="zb-h2", norm="validated later")


MUTANTS: Mutants = {
    "moments not rolled back": ([(post_validation.RollbackCopies, "restore", _without_moments)], [_LATER]),
    "gradients not rolled back": ([(post_validation.RollbackCopies, "restore", _without_gradients)], [_LATER]),
    "forward passes before a roll-back not run again": (
        [(executor.PipelineExecutor, "_validate", _keeps_forwards)],
        [_LATER],
    ),
    "step not clipped after a roll-back": (
        [(distrib_optimizer.DistributedOptimizer, "_update", _unclipped)],
        [_LATER],
    ),
    "tied embeddings not summed over stages": (
        [(finalize, "_sum_shared_grads", nothing)],
        [Combination.of(world="2", pp="2"), Combination.of(world="4", pp="2", optimizer="overlapped")],
    ),
    "weight gradients left in the queue": (
        [(weight_grad.WeightGradQueue, "run", lambda self, key: self._jobs.pop(key))],
        [Combination.of(world="2", pp="2", schedule="zb-h1"), Combination.of(world="2", pp="2", schedule="zb-v")],
    ),
    "last stage takes micro-batches in another order": (
        [(executor.PipelineExecutor, "_begin", _reversed_on_last_stage)],
        [Combination.of(world="2", pp="2")],
    ),
    "labels of multi-token prediction shifted by one too few": (
        [(Batch, "with_future", _labels_too_near)],
        [Combination.of(multi_token="1"), Combination.of(world="2", cp="2ring", multi_token="2")],
    ),
    "last tokens of multi-token prediction not masked": (
        [(Batch, "with_future", _last_tokens_count)],
        [Combination.of(multi_token="2"), Combination.of(world="2", pp="2", multi_token="1")],
    ),
    "factor of multi-token prediction applied twice": (
        [(MultiTokenPrediction, "forward", _factor_twice)],
        [Combination.of(multi_token="2"), Combination.of(world="2", pp="2", multi_token="1")],
    ),
    "the embedding's copy for multi-token prediction not summed over stages": (
        [(finalize, "_sum_shared_grads", nothing)],
        [Combination.of(world="2", pp="2", embeddings="untied", multi_token="1")],
    ),
}
