"""The planned bytes of Muon's states, low-precision states and states in host memory equal the allocated bytes."""

from __future__ import annotations

import pytest

from tests.extensions import needs
from tests.extensions.planner.test_measured_memory import FP32, LLAMA, PADDED, PARTS_OF_EXPERTS, ZERO2, check
from tests.extensions.planner.test_out_of_memory import report

AWARE = "--use-precision-aware-optimizer"
OFFLOAD = "--optimizer-cpu-offload --optimizer-offload-fraction"


RUNS = [
    "--tp 2 --optimizer muon",
    f"{LLAMA} --tp 2 {FP32} --optimizer muon",
    f"{PARTS_OF_EXPERTS} {ZERO2} --optimizer muon",
    f"{AWARE} --main-grads-dtype bf16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16",
    needs("offload", f"{LLAMA} --tp 2 {AWARE} --main-params-dtype fp16 --exp-avg-dtype bf16 {OFFLOAD} 0.7"),
    needs("offload", f"{LLAMA} --tp 2 {FP32} --param-group 'fc1 lr_mult=2' {OFFLOAD} 0.3"),
]


@pytest.mark.parametrize("flags", RUNS)
def test_the_plan_equals_the_allocated_bytes(flags: str) -> None:
    check(4, f"{PADDED} {flags}", beyond=100 if "--num-experts" in flags else 1)


def test_out_of_memory_errors_suggest_low_precision_states() -> None:
    assert "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16" in report("")
