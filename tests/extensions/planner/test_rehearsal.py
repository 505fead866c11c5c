"""A rehearsal of a rank records the collectives that the rank calls in a real run over gloo, in the same order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.extensions.plan.planner.rehearsal import collective_log
from megatron.extensions.plan.planner.rehearsal.collective_log import CollectiveLog
from megatron.extensions.plan.planner.rehearsal.fake_rank import Lost, Rehearsal, forked, rehearsal_of, rehearse_rank
from megatron.extensions.plan.planner.rehearsal.matching import (
    Box,
    Collective,
    RankRecord,
    coverage_problems,
    mismatches,
)
from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from megatron.training.train_step import train_step
from tests.harness import local_run, run_world
from tests.tiny import TINY

COMMON = f"{TINY} --num-layers 4 --seq-length 16 --micro-batch-size 1 --train-iters 1 --bf16 --ddp-bucket-size 2000"

EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-expert-capacity-factor 1 --moe-pad-expert-input-to-capacity "
    "--moe-token-dispatcher-type alltoall"
)
"""Flags that pad the input of each expert to the expert's capacity. Without padding, the message sizes in a real run
would depend on the tokens."""

LAYOUTS = [
    "--tp 2 --pp 2 --sequence-parallel --global-batch-size 6 --overlap-grad-reduce --overlap-param-gather",
    "--pp 2 --num-layers-per-virtual-pipeline-stage 1 --global-batch-size 8 --recompute-granularity full "
    "--recompute-method uniform --recompute-num-layers 1",
    "--cp 2 --data-parallel-sharding-strategy optim_grads_params --global-batch-size 4",
    f"--ep 2 --tp 2 --sequence-parallel --global-batch-size 4 --data-parallel-sharding-strategy optim_grads {EXPERTS}",
    "--pp 2 --pipeline-schedule zb-h1 --global-batch-size 6 --fp8-format hybrid --cpu-offloading "
    "--cpu-offloading-num-layers 1",
    "--pp 4 --pipeline-schedule zb-v --num-layers 8 --global-batch-size 8 --untie-embeddings-and-output-weights",
]


class RealLog(CollectiveLog, TorchDispatchMode):
    """Log of the collectives that a rank calls in a real process group. Tensor collectives that are called inside
    object collectives, such as `all_gather_object`, are not logged."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        CollectiveLog.__init__(self)
        self.of_objects = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.of_objects:
            self.record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def answer(self, real: Callable[..., Any], given: Mapping[str, Any]) -> None:
        self.of_objects = True
        real(**given)
        self.of_objects = False


def recorded(rank: int, world_size: int, config: RunConfig) -> list[Collective]:
    log = RealLog()
    passed = mock.patch.object(collective_log, "PASSED", (*collective_log.PASSED, Path(__file__)))
    with passed, log, log.objects(), local_run(config, rank, world_size) as run:
        train_step(run)
    return log.collectives


def all_ranks(rehearsal: Rehearsal) -> list[RankRecord]:
    """Rehearse all ranks in one process, so that they share torch's fake-tensor cache."""
    return [rehearse_rank(rehearsal, rank) for rank in range(4)]


def bare(collectives: Sequence[Collective]) -> list[Collective]:
    """Remove the collectives that `ranks_without` calls, because a real run on CPUs calls this function once more than
    a rehearsal. Clear the phases and micro-batch numbers of the remaining collectives."""
    asked = " in ranks_without"
    return [each._replace(phase="", microbatch=-1) for each in collectives if not each.site.endswith(asked)]


@pytest.mark.grid("flags", (LAYOUTS[0], LAYOUTS[4]), LAYOUTS)
def test_a_real_rank_calls_the_rehearsed_collectives(flags: str) -> None:
    config = resolve_legal(parse_args([*COMMON.split(), *flags.split()]), 4)
    rehearsal = rehearsal_of(config, 4, whole=True)
    (records,) = forked({0: partial(all_ranks, rehearsal)}, workers=1)
    assert not isinstance(records, Lost)
    assert [record.failure for record in records] == [None] * 4
    assert not mismatches(records) and not coverage_problems(records, every_rank=True)
    assert all(record.boxes for record in records if record.rank == 0)
    for record, real in zip(records, run_world(4, recorded, config), strict=True):
        step = bare(record.collectives)
        assert step == bare(real)
        assert step


def test_elements_written_by_two_ranks_or_none_are_reported() -> None:
    def written(*offsets: int) -> list[RankRecord]:
        boxes = [Box("w", (6, 4), (offset, 0), (2, 4), 2) for offset in offsets]
        return [RankRecord(rank, {"dp": rank}, boxes=[box]) for rank, box in enumerate(boxes)]

    assert not coverage_problems(written(0, 2, 4), every_rank=True)
    (twice,) = coverage_problems(written(0, 2, 3), every_rank=True)
    assert twice == "w: rank 1 (dp 1) and rank 2 (dp 2) write the same elements"
    assert coverage_problems(written(0, 4), every_rank=True) == ["w (6, 4): no rank writes all of its elements"]
    assert not coverage_problems(written(0, 4), every_rank=False)
