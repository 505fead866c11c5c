"""Tests of weight gradients: the precision of their accumulation, and the queue for deferred weight gradients. The
tests also cover token ids that are in no rank's vocabulary shard.

tests/parity/test_matrix.py compares the outputs and gradients of the layers with a one-process run.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megatron.core.models.gpt.embedding import VocabParallelEmbedding
from megatron.core.parallel_state import initialize_model_parallel
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue, accumulate_weight_grad, add_product_, add_rows_
from tests.harness import run_world, tp_context


def test_main_grad_accumulates_in_its_own_precision() -> None:
    """The test adds up 768 ones, and then 256 terms whose sum is 1/4. A bf16 sum would stop growing at 256."""
    out = torch.zeros(1, 1)
    one = torch.ones(256, 1, dtype=torch.bfloat16)
    for _ in range(3):
        add_product_(out, one, one)
    add_product_(out, one, one / 2**10)
    assert out.item() == 768.25
    rows = torch.zeros(3, 1)
    add_rows_(rows, torch.tensor([2] * 256 + [0]), torch.cat([one, one[:1] / 2]))
    assert rows.flatten().tolist() == [0.5, 0.0, 256.0]


def unknown_token(rank: int, size: int) -> str:
    meta = ParamMeta("embedding.weight", (40, 12), {"tp": 0}, Init("normal", 0.3), role="embedding")
    embedding = VocabParallelEmbedding(meta, tp_context(initialize_model_parallel(size)))
    with pytest.raises(ValueError, match="token ids must be in") as error:
        embedding(torch.tensor([[0, 40]]))
    return str(error.value)


def test_a_token_outside_the_vocabulary_is_an_error() -> None:
    """A token id outside the vocabulary is in no rank's vocabulary shard. Without a check, its embedding would silently
    be zero."""
    for message in run_world(2, unknown_token):
        assert message.startswith("token ids must be in [0, 40)")
        assert message.endswith("found ids from 0 to 40")


def add_four_(out: Tensor, overwrite: bool) -> None:
    (out.zero_() if overwrite else out).add_(4)


def test_deferred_work_runs_per_key_and_must_not_be_left_over() -> None:
    queue = WeightGradQueue()
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.main_grad = torch.zeros(2, 3)
    for key in ((0, 0), (0, 1)):
        queue.begin(key)
        assert accumulate_weight_grad(weight, add_four_, queue) is None
        queue.end()
    assert not queue.defers(weight) and not weight.main_grad.any()
    queue.run((0, 1))
    assert weight.main_grad.eq(4).all()
    with pytest.raises(AssertionError, match=r"were not computed: \[\(0, 0\)\]"):
        queue.assert_empty()
    with pytest.raises(AssertionError, match="have not been run"):
        queue.begin((0, 0))
    queue.run((0, 0))
    queue.assert_empty()
    assert weight.main_grad.eq(8).all()


def test_frozen_weights_are_not_queued_and_others_go_to_autograd() -> None:
    queue = WeightGradQueue()
    frozen, plain = (nn.Parameter(torch.zeros(2, 3), requires_grad=trained) for trained in (False, True))
    frozen.main_grad = torch.zeros(2, 3)
    queue.begin(0)
    assert accumulate_weight_grad(frozen, add_four_, queue) is None
    assert torch.equal(accumulate_weight_grad(plain, add_four_, queue), torch.full((2, 3), 4.0))
    assert not queue.defers(plain)
    queue.end()
    queue.run(0)
    assert not frozen.main_grad.any() and plain.grad is None
