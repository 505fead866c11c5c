"""Tests of QK-Clip. The tests cover the computation of the largest attention logit of each head, and the clipping of
the head's weights."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from megatron.extensions.optim.optimizers.qk_clip import QKClip, of_elements
from megatron.training.train_step import train_step
from tests.harness import run_world, running
from tests.tiny import TINY

MODEL = f"{TINY} --num-layers 1 --hidden-size 32 --micro-batch-size 2 --init-method-std 0.5 --lr 1e-9 --weight-decay 0 "
MODEL += "--fp64 --train-iters 9 --attention-dropout 0 --hidden-dropout 0 "
LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 6 --qk-pos-emb-head-dim 4 --v-head-dim 5"
    " --position-embedding-type rope"
)
PLAIN = "--group-query-attention --num-query-groups 2 --add-qkv-bias --attention-output-gate"
DIFFERENTIAL = "--attention-module differential_attention --group-query-attention --num-query-groups 2 --add-qkv-bias"
TAU = 0.1


def largest_of_two_steps(rank: int, world_size: int, flags: str) -> list[torch.Tensor]:
    """Return the largest logits before and after a step for the same samples. Only QK-Clip changes weights in the
    step."""
    true = QKClip.largest
    found: list[list[torch.Tensor]] = []

    def noted(self: QKClip) -> list[torch.Tensor]:
        found.append(true(self))
        return found[-1]

    with mock.patch.object(QKClip, "largest", noted), running(flags.split(), rank, world_size) as run:
        train_step(run)
        run.progress.consumed_samples = 0
        train_step(run)
        return [largest for (largest,) in found]


@pytest.mark.parametrize("heads", [PLAIN, LATENT, DIFFERENTIAL], ids=["plain", "latent", "differential"])
def test_no_head_stays_above_the_threshold(heads: str) -> None:
    """The learning rate is near zero, so only QK-Clip changes the weights. QK-Clip scales all logits of a head by the
    same factor."""
    ((before, after),) = run_world(1, largest_of_two_steps, f"{MODEL} {heads} --qk-clip --qk-clip-threshold {TAU}")
    assert (before > TAU).any()
    bound = torch.where(before > TAU, TAU, before)
    assert (after <= bound + 1e-6).all()
    if heads == LATENT:  # the largest logits of heads that do not share keys are exactly at the threshold
        torch.testing.assert_close(after, bound, rtol=1e-5, atol=1e-6)


def test_a_threshold_that_no_head_exceeds_changes_nothing() -> None:
    ((before, after),) = run_world(1, largest_of_two_steps, f"{MODEL} {PLAIN} --qk-clip --qk-clip-threshold 1e4")
    torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)


def test_row_factors_are_expanded_to_flat_ranges() -> None:
    of_rows = torch.arange(6.0).view(2, 3)
    whole = of_rows[:, :, None].expand(2, 3, 5).flatten()
    for start, stop in ((0, 30), (3, 4), (7, 23), (29, 30)):
        assert torch.equal(of_elements(of_rows, 5, start, stop), whole[start:stop])
