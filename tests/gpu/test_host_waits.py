"""Torch itself checks that the host never waits for the GPU during a training step. The step runs in a separate
process, as in all tests of this folder.

The checks do not detect that the host waits for the event of the previous step's outcome (`StepGuard.settle`). This
wait is intended.
"""

from __future__ import annotations

import pytest
import torch

from tests.apart import python_apart
from tests.gpu.test_training import FLAGS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16",
        "--bf16 --hidden-dropout 0.1 --attention-dropout 0.1 --no-compile",
        "--bf16 --window-size 40 --recompute-granularity full --check-for-spiky-loss --log-straggler",
        "--fp16 --initial-loss-scale 4096",
        "--fp32",
        "--bf16 --num-experts 4 --disable-bias-linear --moe-grouped-gemm",
        "--bf16 --num-experts 4 --disable-bias-linear --moe-grouped-gemm --moe-expert-capacity-factor 1 "
        "--moe-token-dispatcher-type alltoall --moe-shared-expert-intermediate-size 64",
        "--bf16 --cuda-graph-impl local --cuda-graph-warmup-steps 1",
    ],
)
def test_a_step_waits_for_nothing(flags: str) -> None:
    ended = python_apart("-m", "tests.gpu.watched_step", *FLAGS, *flags.split())
    assert ended.returncode == 0 and "losses" in ended.stdout, ended.stdout + ended.stderr
