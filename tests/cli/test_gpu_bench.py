"""Tests of tools/bench/gpu.py without a GPU. The tests cover the choice of models that fit in memory, a complete run,
and the grouping of profiled kernels."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import pytest

from tests.apart import python_apart
from tests.forked import ROOT, run_program
from tools.bench.device_time import GROUPS, IDLE, OTHER, OWN, group_of, groups_of_trace
from tools.bench.gpu import PRECISIONS, SHAPES, config_of, largest_that_fits, planned_bytes

TRIAL = "--cpu --config tiny --steps 1 --rounds 2 --warm-up 1"


def bench(flags: list[str]) -> subprocess.CompletedProcess[str]:
    return run_program("tools/bench/gpu.py", *TRIAL.split(), *flags)


def test_a_whole_benchmark_runs_without_a_gpu(tmp_path: Path) -> None:
    found, trace = tmp_path / "found.json", tmp_path / "trace.json"
    done = bench(["--precision", "fp8", "--fp8-recipe", "tensorwise", "--json", str(found), "--trace", str(trace)])
    assert done.returncode == 0, done.stderr
    assert "| cpu | tiny fp8 | 2 | 2 x 2 |" in done.stdout and "| unknown |" in done.stdout
    (row,) = json.loads(found.read_text())["rows"]
    assert row["layers"] == 2 and row["micro_batch_size"] == 2 and row["tokens_per_second"]["rounds"] == 2
    names = [ceiling["name"] for ceiling in row["ceilings"]]
    assert names[:2] == ["64^3 bf16", "qkv bf16"] and names[-1] == "copy" and "fc1 fp8" in names
    groups = {group["name"]: group for group in row["groups"]}
    for name in ("GEMM", "attention", "norm", "optimizer", "copies", "elementwise", "fp8 casts", IDLE):
        assert groups[name]["share"] > 0, name
    assert sum(group["share"] for group in groups.values()) == pytest.approx(1)
    assert json.loads(trace.read_text())["traceEvents"]


def test_compared_flags_are_measured_in_turns() -> None:
    done = bench(["--compare", "--recompute-granularity full", "--rounds", "1"])
    assert done.returncode == 0, done.stderr
    assert "--recompute-granularity full" in done.stdout and done.stdout.count(" x as it is") == 1


@pytest.mark.grid("precision", ["bf16"], list(PRECISIONS))
def test_the_largest_model_that_fits_is_chosen(precision: str) -> None:
    flags = PRECISIONS[precision].format(format="hybrid", recipe="delayed")
    layers, room = SHAPES["llama-8b-layers"], 72 * 2**30
    config = largest_that_fits(layers, flags, room)
    more = config_of(layers, config.model.num_layers + 1, 1, flags)
    assert sum(planned_bytes(config)) <= room < sum(planned_bytes(more))
    assert 8 <= config.model.num_layers <= 12
    gpt = largest_that_fits(SHAPES["gpt-1.3b"], flags, room)
    assert gpt.model.num_layers == 24 and gpt.training.micro_batch_size in (4, 8, 16)
    with pytest.raises(ValueError, match=r"the smallest configuration needs 2\d\.\d\d GiB, and 1\.00 are available"):
        largest_that_fits(layers, flags, 2**30)
    with pytest.raises(ValueError, match="--recompute-granularity half"):
        config_of(layers, 1, 1, f"{flags} --recompute-granularity half")


def test_every_kernel_of_the_library_has_a_group() -> None:
    """The test covers only kernels that the host launches, not device functions that kernels call."""
    kernels, called = set[str](), set[str]()
    for path in (ROOT / "megatron").rglob("*_triton.py"):
        functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
        of_gpus = [
            node
            for node in functions
            if any(ast.unparse(each).startswith("triton.jit") for each in node.decorator_list)
        ]
        kernels |= {node.name for node in of_gpus}
        called |= {node.id for kernel in of_gpus for node in ast.walk(kernel) if isinstance(node, ast.Name)}
    assert kernels - called == set(OWN)
    assert set(OWN.values()) <= {*GROUPS, OTHER}
    assert {group_of(name) for name in OWN} == set(OWN.values())


def test_kernels_of_a_trace_are_grouped() -> None:
    """The profile has two streams that overlap for 10 µs, an idle gap of 20 µs, and events that are not kernels."""
    events = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_a", "ts": 100, "dur": 50, "pid": 0, "tid": 7},
        {"ph": "X", "cat": "kernel", "name": "ncclDevKernel", "ts": 140, "dur": 40, "pid": 0, "tid": 9},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 200, "dur": 10, "pid": 0, "tid": 7},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "F(stage 0, microbatch 0)", "ts": 90, "dur": 500, "tid": 7},
        {"ph": "i", "cat": "kernel", "name": "no span", "ts": 0},
    ]
    groups = {group.name: group for group in groups_of_trace({"traceEvents": events})}
    assert {name: group.microseconds for name, group in groups.items()} == {
        "GEMM": 50,
        "collectives": 40,
        "copies": 10,
        IDLE: 20,
    }
    assert groups["GEMM"].share == pytest.approx(50 / 110)


def test_benchmarks_accept_flags_of_extensions() -> None:
    """A benchmark program loads the extensions before it parses flags. This process has already loaded the extensions,
    so the test starts a new process."""
    program = (
        "from tools.bench.gpu import parser_of_args\n"
        "from megatron.training.config.flags import spelling_table\n"
        "parser_of_args()\n"
        "print('--tp-comm-overlap' in spelling_table())\n"
    )
    assert python_apart("-c", program, code=0).stdout == "True\n"
