"""What `--pipeline-schedule 2bw` cannot be combined with."""

from __future__ import annotations

import pytest

from megatron.core.parts import update_ahead
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from tests.rules import BASE, problems

RUN = "--pp 4 --pipeline-schedule 2bw --log-interval 10 --untie-embeddings-and-output-weights"
EXPERTS = "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", ""),
        (EXPERTS, ""),
        ("--fp16", "cannot be combined with --fp16"),
        ("--bf16 --fp8-format hybrid", "--fp8-format"),
        ("--bf16 --use-precision-aware-optimizer", "--use-precision-aware-optimizer"),
        ("--bf16 --optimizer-cpu-offload", "--optimizer-cpu-offload"),
        ("--data-parallel-sharding-strategy optim_grads", "--data-parallel-sharding-strategy optim_grads"),
        ("--optimizer muon", "--optimizer muon"),
        ("--qk-clip", "--qk-clip"),
        ("--bf16 --cpu-offloading --cpu-offloading-num-layers 1", "--cpu-offloading"),
        ("--optimizer-post-validation", "--optimizer-post-validation"),
        (f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias", "expert-bias"),
        ("--num-experts 4 --disable-bias-linear --moe-aux-loss-coeff 0.1", "use seq_aux_loss"),
        ("--global-batch-size 3 --micro-batch-size 1", "nearest: 4"),
        ("--num-virtual-stages-per-pipeline-rank 2", "must be 1 with --pipeline-schedule 2bw"),
    ],
)
def test_what_is_refused(flags: str, expected: str) -> None:
    found = problems(f"--global-batch-size 8 {RUN} {flags}", 4)
    assert len(found) == bool(expected) and all(expected in line and "2bw" in line for line in found), found


@pytest.mark.parametrize(
    ("flags", "expected"),
    [("--log-interval 1", "--log-interval 1"), ("--no-untie-embeddings-and-output-weights", "has a bubble")],
)
def test_where_ranks_wait_all_the_same(flags: str, expected: str) -> None:
    (found,) = problems(f"--global-batch-size 8 {RUN} {flags}", 4)
    assert expected in found and found.startswith("--pipeline-schedule 2bw")


def test_only_this_schedule_updates_late() -> None:
    for flags, ahead in (("", None), (RUN, "two versions of weights")):
        config = resolve(parse_args(f"{BASE} --global-batch-size 8 {flags}".split()), 4)
        assert update_ahead(config.optimizer) == ahead
