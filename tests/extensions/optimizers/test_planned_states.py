"""Planned bytes of states of Muon, in few bits and in host memory are those that are allocated."""

from __future__ import annotations

import pytest

from tests.extensions import needs
from tests.extensions.planner.test_out_of_memory import report
from tests.extensions.planner.test_planned_memory import EXPERTS, LLAMA, compare
from tests.harness import run_world

AWARE = "--bf16 --use-precision-aware-optimizer"
OFFLOAD = "--optimizer-cpu-offload --optimizer-offload-fraction"


@pytest.mark.parametrize(
    "flags",
    [
        "--tp 2 --bf16 --optimizer muon",
        f"{LLAMA} --tp 2 --fp32 --optimizer muon",
        needs("unit_sharding", f"{EXPERTS} optim_grads --optimizer muon"),
        f"{AWARE} --main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
        needs("offload", f"{LLAMA} --tp 2 {AWARE} --main-params-dtype fp16 --exp-avg-dtype bf16 {OFFLOAD} 0.7"),
        needs("offload", f"{LLAMA} --tp 2 --fp32 --param-group 'fc1 lr_mult=2' {OFFLOAD} 0.3"),
    ],
)
def test_plan_equals_what_is_allocated(flags: str) -> None:
    for planned, allocated in run_world(4, compare, flags):
        assert planned == allocated


def test_states_in_fewer_bits_are_named_where_memory_ran_out() -> None:
    assert "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16" in report("")
