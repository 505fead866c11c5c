"""Tests of plans with weights in host memory: bytes on device and host, and the time of copies that do not overlap with
computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.training.config.arguments import parse_args
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import resolve_legal
from tests.forked import ROOT

pytest.importorskip("megatron.extensions.plan.planner")

from megatron.extensions.plan.planner.device_file import read_device
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.memory import GIB, RankMemory, memory_of_ranks
from megatron.extensions.plan.planner.memory_lines import Fit
from megatron.extensions.plan.planner.time.step_time import predict_step
from megatron.extensions.plan.planner.time.weight_copies import UnitPass, exposed

LLAMA_8B = (
    f"--config {ROOT}/configs/8b.yaml --mock-data --tp 1 --no-sequence-parallel --no-overlap-grad-reduce "
    "--no-overlap-param-gather --global-batch-size 16 --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1 --loss-chunk-tokens 1024 --optimizer-cpu-offload --offload-weights"
)
"""Flags of the Llama 8B command in docs/optimizers.md."""

LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
VOCABULARY = 128256 * 4096
MATRICES = 32 * LAYER + 2 * VOCABULARY
CACHE = PlannerCache()


def config_of(flags: str) -> RunConfig:
    config = resolve_legal(parse_args(flags.split()), 1)
    return replace(config, parallel=replace(config.parallel, cpu=False))


def planned(flags: str) -> RankMemory:
    (rank,) = memory_of_ranks(config_of(flags), 1, CACHE)
    return rank


def test_llama_8b_trains_on_a_card_of_24_gb() -> None:
    """The device holds the parameters of at most two sharding units (such as layers) and the gradients of at most three
    sharding units at the same time. Norms and activations always stay on the device."""
    rank = planned(LLAMA_8B)
    flying, memory = rank.plan.in_flight, rank.plan.memory
    assert flying.parameters == 2 * (VOCABULARY + LAYER) and flying.gradients == 4 * (VOCABULARY + 2 * LAYER)
    norms = 65 * 4096
    assert (memory.parameters, memory.gradients, memory.optimizer) == (2 * norms, 4 * norms, 0)
    assert memory.host_parameters == 2 * MATRICES and memory.host_gradients == 4 * MATRICES
    assert memory.host_states == 12 * (MATRICES + norms)
    assert rank.total < 10 * GIB < read_device("rtx4090").memory_gib * GIB
    assert rank.host < 135 * GIB


def test_a_plan_states_the_missing_host_memory() -> None:
    memory, device = [planned(LLAMA_8B)], read_device("rtx4090")
    short = Fit.of(memory, 24, replace(device, host_memory_gib=64.0))
    assert list(short.lines)[1:] == [
        "does not fit the host: pp 0 keeps most there, 134.6 of 64 GiB (host_memory_gib of the device file), 70.6 too "
        "much"
    ]
    lacks = {"host_memory": 64 * GIB, "host_bytes_over": memory[0].host - 64 * GIB}
    assert short.record == {"fits": False, "device_memory": 24 * GIB, "fullest_pp_rank": 0, "bytes_over": 0, **lacks}
    assert Fit.of(memory, None, replace(device, host_memory_gib=64.0)).record == {"fits": False, **lacks}
    for enough in (replace(device, host_memory_gib=192.0), replace(device, host_memory_gib=None), None):
        fit = Fit.of(memory, None, enough)
        assert not list(fit.lines) and not fit.record


def test_files_contain_the_matrices_instead_of_host_memory() -> None:
    """With its weights in files, Llama 3.1 8B needs almost no host memory. The files contain 18 bytes per matrix
    element."""
    memory = planned(f"{LLAMA_8B} --offload-weights-folder FOLDER").plan.memory
    assert memory.disk == 18 * MATRICES and memory.host < 10 * 2**20
    device, config = read_device("rtx4090"), config_of(f"{LLAMA_8B} --offload-weights-folder FOLDER")
    slow, fast = (predict_step(config, 1, replace(device, disk_gb_per_second=rate), cache=CACHE) for rate in (3.0, 1e3))
    assert slow.parts["optimizer"] > 2 * fast.parts["optimizer"] and slow.parts["offload"] > fast.parts["offload"]


def test_the_step_of_llama_8b_waits_for_copies_and_for_the_host() -> None:
    device = replace(read_device("rtx4090"), host_gb_per_second=25.0, host_update_gb_per_second=50.0)
    config = config_of(LLAMA_8B)
    step = predict_step(config, 1, device, cache=CACHE)
    # Per matrix element, 12 bytes of states are read and written, and 2 + 4 * 4 bytes of parameters and gradient sums
    # are moved.
    moved = 2 * 12 * MATRICES + (2 + 4 * 4) * MATRICES
    assert step.parts["optimizer"] == pytest.approx(moved / 50e9, rel=0.01)
    fast = predict_step(config, 1, replace(device, host_gb_per_second=1e6), cache=CACHE)
    assert fast.parts["offload"] == 0.0 < step.parts["offload"] < 0.05 * step.seconds
    slow = predict_step(config, 1, replace(device, host_gb_per_second=1.0), cache=CACHE)
    # Lower bound on the time of all copies, which counts only the copies to the device.
    passes = 16 * (2 * MATRICES + 2 * (MATRICES - 2 * VOCABULARY) + 4 * MATRICES) / 1e9
    assert slow.parts["offload"] + slow.parts["matmul"] > 0.9 * passes


def test_copies_that_take_longer_than_a_pass_are_exposed() -> None:
    forward, backward = UnitPass(1.0, 2e9), UnitPass(2.0, 3e9, left=5e9)
    # Copying the gradients of the previous step takes 5 seconds.
    assert exposed([forward, backward], 1.0) == [4.0, 0.0]
    assert exposed([forward, backward], 2.5) == [1.0, 0.0]
    assert exposed([forward, backward], 5.0) == [0.0, 0.0]
