"""tools/bench/fake_cuda.py runs training steps on fake CUDA tensors. The tool requires a CUDA build of torch, but no
GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.apart import run_command
from tools.bench.fake_cuda import unavailable

ROOT = Path(__file__).parents[2]
RUNS = {
    "bf16": [],
    "fp8 delayed": ["--precision", "fp8"],
    "fp8 rowwise": ["--precision", "fp8", "--fp8-recipe", "rowwise"],
    "experts": ["--flags", "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm"],
}


def run(*command: str, code: int) -> subprocess.CompletedProcess[str]:
    return run_command([sys.executable, *command], code)


@pytest.mark.skipif(unavailable() is not None, reason=f"tools/bench/fake_cuda.py {unavailable()}")
@pytest.mark.parametrize("name", RUNS)
def test_a_step_ends_and_every_region_is_compiled(name: str) -> None:
    done = run("tools/bench/fake_cuda.py", "--config", "tiny", *RUNS[name], code=0)
    assert done.stdout.endswith("regions that ran uncompiled: none\n") and " graphs, " in done.stdout


@pytest.mark.skipif(unavailable() is None, reason="torch's CUDA build is installed")
def test_a_build_without_cuda_is_reported_in_one_line() -> None:
    done = run("tools/bench/fake_cuda.py", "--config", "tiny", code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("fake_cuda.py needs ") and done.stderr.count("\n") == 1


BEYOND_ITS_LIMIT = """
import torch
from megatron.core import compiled_regions
from megatron.extensions.plan.planner.device_file import read_device
from tools.bench.fake_cuda import fake_cuda, watched_regions

def scaled(x):
    return (x * 2).sin()

torch._dynamo.config.recompile_limit = compiled_regions.RECOMPILE_LIMIT = 2
with fake_cuda(read_device("h100")) as mode, watched_regions(mode) as uses:
    for rows in (16, 32, 48):
        compiled_regions.region(scaled, True, static=True)(torch.empty(rows, 64, device="cuda"))
(use,) = uses.values()
assert (use.calls, use.graphs, use.eager_calls) == (3, 2, 1), use
"""


@pytest.mark.skipif(unavailable() is not None, reason=f"tools/bench/fake_cuda.py {unavailable()}")
def test_a_region_beyond_its_recompile_limit_is_detected() -> None:
    run("-c", BEYOND_ITS_LIMIT, code=0)
