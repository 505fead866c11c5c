"""tools/bench/gpu_bytes.py: the kernels of a step on fake CUDA tensors, beside golden sums.

Needs torch's CUDA build, without a GPU. The sums are those of one minor version of torch, whose Inductor and
decompositions decide how many kernels there are. `python -m tests.cli.test_gpu_bytes` writes them anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.limits import HANG
from tools.bench.fake_cuda import unavailable
from tools.bench.kernel_groups import GROUPS

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "fixtures" / "gpu_bytes.json"
RUNS = {
    "bf16": "",
    "fp8 delayed": "--precision fp8",
    "fp8 rowwise": "--precision fp8 --recipe rowwise",
    "experts": "--flags '--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm'",
}
VERSION = ".".join(torch.__version__.split(".")[:2])


def sums_of(flags: str, folder: Path) -> dict[str, Any]:
    """Launches, bytes and FLOPs by part and group, and the graphs of each region."""
    found = folder / "found.json"
    command = f"{sys.executable} tools/bench/gpu_bytes.py --config tiny --layers 2 --samples 1 {flags} --json {found}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "regions that ran eager: none" in done.stdout and "predicted MFU" in done.stdout
    figures = json.loads(found.read_text())
    keys = ("launches", "read", "written", "flops")
    parts = {
        part: {group: [round(sums[key]) for key in keys] for group, sums in rows["groups"].items()}
        for part, rows in figures["parts"].items()
    }
    return {"parts": parts, "graphs": {region["name"]: region["compilations"] for region in figures["regions"]}}


@pytest.mark.skipif(unavailable() is not None, reason=f"tools/bench/gpu_bytes.py {unavailable()}")
@pytest.mark.parametrize("name", RUNS)
def test_kernels_are_the_golden_ones(name: str, tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    if golden["torch"] != VERSION:
        pytest.skip(f"the golden sums are those of torch {golden['torch']}, this is {VERSION}")
    found = sums_of(RUNS[name], tmp_path)
    assert found == golden["runs"][name], "python -m tests.cli.test_gpu_bytes"


def test_the_golden_sums_hold_what_a_step_must_do() -> None:
    """The model of `tiny`: h 64, ffn 192, 4 heads in 2 groups, s 32, v 512; one sample."""
    golden = json.loads(GOLDEN.read_text())["runs"]
    assert set(golden) == set(RUNS)
    qkv, proj, fc1, fc2 = 64 * 128, 64 * 64, 64 * 384, 192 * 64
    for name, run in golden.items():
        layer, micro_batch, step = (run["parts"][part] for part in ("layer", "micro-batch", "step"))
        assert set(layer) | set(micro_batch) | set(step) <= set(GROUPS)
        if name != "experts":
            assert layer["GEMMs"][0] == 12 and layer["GEMMs"][3] == 6 * 32 * (qkv + proj + fc1 + fc2), name
        assert micro_batch["GEMMs"][3] == 6 * 32 * 64 * 512
        assert layer["attention"][0] == 2 and layer["attention"][3] == 7 * 4 * 32 * 32 * 16
        assert step["optimizer"][1] > 0
        assert all(graphs > 0 for graphs in run["graphs"].values())


@pytest.mark.skipif(unavailable() is None, reason="torch's CUDA build is installed")
def test_without_the_cuda_build_one_line_says_so() -> None:
    command = [sys.executable, "tools/bench/gpu_bytes.py", "--config", "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu_bytes.py needs ") and done.stderr.count("\n") == 1


BEYOND_ITS_LIMIT = """
import torch
from megatron.core import compiled_regions
from megatron.extensions.planner.device_file import read_device
from tools.bench.fake_cuda import fake_cuda
from tools.bench.kernel_trace import KernelCounter, Trace, counted_regions

def scaled(x):
    return (x * 2).sin()

trace = Trace()
counter = KernelCounter(trace, cache=2**20)
torch._dynamo.config.recompile_limit = compiled_regions.RECOMPILE_LIMIT = 2
with fake_cuda(read_device("h100")) as mode, counted_regions(trace, counter, mode), counter:
    for rows in (16, 32, 48):
        compiled_regions.region(scaled, True, static=True)(torch.empty(rows, 64, device="cuda"))
(use,) = trace.regions.values()
assert (use.calls, use.compilations, use.eager_calls) == (3, 2, 1), use
names = sorted((kernel.name.split()[0], kernel.read, kernel.written) for kernel in trace.kernels)
size = 64 * 4
assert names[:2] == [("__main__.scaled", rows * size, rows * size) for rows in (16, 32)], names
assert names[2:] == [(name, 48 * size, 48 * size) for name in ("mul", "sin")], names
"""


@pytest.mark.skipif(unavailable() is not None, reason=f"tools/bench/gpu_bytes.py {unavailable()}")
def test_a_region_beyond_its_limit_of_variants_is_found_and_counted_as_it_runs() -> None:
    command = [sys.executable, "-c", BEYOND_ITS_LIMIT]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


READS_OF_A_ROTATION = """
import torch
from megatron.core import compiled_regions
from megatron.core.transformer.split_heads import _split_and_rotated
from megatron.extensions.planner.device_file import read_device
from tools.bench.fake_cuda import fake_cuda
from tools.bench.kernel_trace import KernelCounter, Trace, counted_regions

def made(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

tokens, groups, q, d = 512, 4, 6, 64
for rotary in (d // 2, d // 4):
    for interleaved in (False, True):
        trace = Trace()
        counter = KernelCounter(trace, cache=2**20)
        with fake_cuda(read_device("h100")) as mode, counted_regions(trace, counter, mode), counter:
            cos_and_sin = made(tokens, 1, 1, rotary), made(tokens, 1, 1, rotary)
            qkv = made(tokens, 1, groups, q + 2, d)
            compiled_regions.region(_split_and_rotated, True, True)(qkv, None, (q, 0, 1, 1), cos_and_sin, interleaved)
        head, tables = tokens * groups * d * 2, 2 * tokens * rotary * 2
        expected = [(head, head), (head + tables, head), (q * head + tables, q * head)]
        found = sorted((kernel.read, kernel.written) for kernel in trace.kernels.elements())
        assert found == expected, (rotary, interleaved, found, expected)
"""


@pytest.mark.skipif(unavailable() is not None, reason=f"tools/bench/gpu_bytes.py {unavailable()}")
def test_a_rotation_reads_each_channel_once_and_nothing_beside_its_heads() -> None:
    """Channels are loaded twice, once for themselves and once for their partners, by loads that have masks."""
    command = [sys.executable, "-c", READS_OF_A_ROTATION]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        runs = {name: sums_of(flags, Path(folder)) for name, flags in RUNS.items()}
    GOLDEN.write_text(json.dumps({"torch": VERSION, "runs": runs}, indent=1) + "\n")
