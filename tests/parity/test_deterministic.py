"""Test that two runs of the same command are bit-identical. With --deterministic-mode, operators whose results may vary
raise an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.transformer.layer import TransformerLayer
from megatron.testing.snapshot import first_difference, train_in_world
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.reliability.failure_report import ADVICE, Failure
from tests.tiny import TINY

FLAGS = TINY.split()


@pytest.mark.parametrize(
    ("world_size", "flags"), [(2, "--deterministic --tp 2 --bf16"), (4, "--tp 2 --pp 2 --sequence-parallel --fp64")]
)
def test_two_runs_are_bit_identical(world_size: int, flags: str) -> None:
    runs = [train_in_world(world_size, [*FLAGS, *flags.split()]) for _ in range(2)]
    assert first_difference(*runs, tolerance=0.0) is None
    assert not runs[0].replica_errors


def test_a_kernel_that_is_not_deterministic_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformerLayer.forward

    def racing(self: TransformerLayer, x: torch.Tensor, context: Any) -> torch.Tensor:
        # both values are written to element 0, and the final value is undefined
        torch.zeros(2).put_(torch.zeros(2, dtype=torch.int64), torch.ones(2))
        return forward(self, x, context)

    monkeypatch.setattr(TransformerLayer, "forward", racing)
    train_in_world(1, FLAGS, steps=1)
    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation") as error:
        train_in_world(1, [*FLAGS, "--deterministic"], steps=1)
    assert Failure.of(error.value, 0, "rank 0 of 1", "step 1", CheckpointConfig()).advice == ADVICE["kernel"]
