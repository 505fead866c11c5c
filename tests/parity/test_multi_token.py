"""The logged losses of multi-token prediction in samples of several documents, at layouts as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.testing.local_run import local_run
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from megatron.training.metrics.meters import MultiTokenLosses
from megatron.training.progress import Interval
from megatron.training.train_step import train_step
from tests.harness import run_world
from tests.tiny import TINY

MODEL = f"{TINY} --seq-length 16 --vocab-size 12 --fp64 --mtp-num-layers 2 --mtp-loss-scaling-factor 0.7 "
PACKED = "--tokenizer-type NullTokenizer --reset-attention-mask --reset-position-ids --eod-mask-loss "


def logged(rank: int, world_size: int, flags: str) -> dict[str, Any]:
    """The losses of the second of two steps, as they are logged."""
    config = resolve(parse_args((MODEL + flags).split()), world_size)
    with local_run(config, rank, world_size) as run:
        (losses,) = (meter for meter in run.meters if isinstance(meter, MultiTokenLosses))
        train_step(run)
        losses.take()
        interval = run.interval = Interval()
        train_step(run)
        taken = torch.cat((losses.take(), interval.losses[0]))
        if world_size > 1:
            dist.all_reduce(taken)
        total, tokens = taken[-2:].tolist()
        return losses.report(taken[:-2], interval) | {"lm_loss": total / tokens}


def test_every_layout_logs_the_same_losses() -> None:
    (expected,) = run_world(1, logged, PACKED)
    assert len({round(loss, 6) for loss in expected.values()}) == 3
    for world_size, layout in ((2, "--tp 2 --sequence-parallel"), (4, "--pp 2 --cp 2"), (2, "--dp 2")):
        for found in run_world(world_size, logged, PACKED + layout):
            assert found == pytest.approx(expected, rel=1e-12)
