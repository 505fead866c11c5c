"""Tests of the predicted step time: the replay of events, the formulas for collectives, and properties of complete
predictions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.pipeline_parallel.layout import PipelineLayout, Stage
from megatron.core.pipeline_parallel.schedules import build_schedule
from megatron.extensions.plan.planner.commands import DryRun
from megatron.extensions.plan.planner.device_file import DeviceFile, Link, read_device
from megatron.extensions.plan.planner.dry_run import step_lines
from megatron.extensions.plan.planner.fake_stage import PlannerCache
from megatron.extensions.plan.planner.micro_batch import MicroBatch
from megatron.extensions.plan.planner.time.events import (
    Collective,
    Event,
    Move,
    Product,
    Wait,
)
from megatron.extensions.plan.planner.time.pipeline import Schedule
from megatron.extensions.plan.planner.time.replay import Network, Placement, Replay
from megatron.extensions.plan.planner.time.step_time import SUBJECTS, StepTime, predict_step
from megatron.extensions.plan.simulator.simulator import StageCosts, simulate
from megatron.training.config.arguments import command_line, parse_args
from megatron.training.config.validation import resolve, validate
from megatron.training.reliability.launch import Launch
from tests.extensions import needs
from tools.bench.gpu import PRECISIONS, SHAPES, config_of

GPU_BYTES = Path(__file__).parents[2] / "fixtures" / "gpu_bytes.json"

LINKS = {"node": Link(100.0, 1.0, 10.0), "network": Link(10.0, 5.0, 20.0)}
GEMM = Product("bf16", 8192, 8192, 8192)
CACHE = PlannerCache()


@pytest.fixture(scope="module")
def device() -> DeviceFile:
    plain = replace(read_device("h100"), links=LINKS, overlap_slowdown=0.0, launch_gap_us=0.0, sustained=1.0)
    return replace(plain, sustained_fp8=None, step_overhead_ms=0.0, ranks_overhead_ms=0.0, adapters_per_node=8)


def replay(device: DeviceFile, *events: Event) -> dict[str, float]:
    groups = {"tp": Placement(4, 4)}
    return Replay(device, Network(device, 8), groups, host_us=0.0).run(events)


def test_a_collective_overlaps_a_gemm_and_the_rest_is_exposed(device: DeviceFile) -> None:
    product = 1e-6 * device.gemm_us("bf16", 8192, 8192, 8192)
    gather = 3 / 4 * 4e9 / 100e9 + 1e-6 * (10 + 3 * 1)
    start, wait = Collective("all_gather", 4 * 10**9, "tp", 1), Wait(1)
    assert gather > product
    assert replay(device, start, GEMM, wait)["tp_communication"] == pytest.approx(gather - product)
    assert replay(device, start, wait, GEMM)["tp_communication"] == pytest.approx(gather)
    assert replay(device, start, *[GEMM] * 40, wait)["tp_communication"] == 0.0
    slowed = replace(device, overlap_slowdown=0.25)
    assert replay(slowed, start, *[GEMM] * 40, wait)["tp_communication"] == pytest.approx(gather / 4)


def test_concurrent_gemms_share_their_last_waves(device: DeviceFile) -> None:
    """Eight GEMMs with 144 output tiles each run at the same time on 132 multiprocessors. A single GEMM would occupy
    two waves, but would fill only about half of them. The tiles of all eight GEMMs together fill nine waves."""
    part, whole = (1e-6 * device.gemm_us("bf16", rows, 9216, 18432) for rows in (512, 4096))
    assert 8 * part > 1.3 * whole
    parts = [Product("bf16", 512, 9216, 18432, at_one_time=8)] * 8
    assert replay(device, *parts)["matmul"] == pytest.approx(whole)


def test_a_step_sustains_more_of_the_rate_of_products_in_fp8(device: DeviceFile) -> None:
    limited = replace(device, sustained=0.5, sustained_fp8=0.8)
    for precision, share in (("bf16", 0.5), ("fp8", 0.8)):
        product = replace(GEMM, precision=precision)
        assert replay(limited, product)["matmul"] == pytest.approx(replay(device, product)["matmul"] / share)


def test_collectives_of_an_axis_follow_each_other(device: DeviceFile) -> None:
    gather = 3 / 4 * 4e9 / 100e9 + 1e-6 * (10 + 3 * 1)
    starts = [Collective("all_gather", 4 * 10**9, "tp", number) for number in (1, 2)]
    assert replay(device, *starts, Wait(1), Wait(2))["tp_communication"] == pytest.approx(2 * gather)
    assert replay(device, *starts)["tp_communication"] == pytest.approx(2 * gather)


def test_a_step_of_small_kernels_is_bound_by_the_host(device: DeviceFile) -> None:
    spent = Replay(device, Network(device, 8), {}, host_us=50.0).run([Move(8)] * 100)
    assert spent.total == pytest.approx(100 * 50e-6)
    assert spent["element_wise"] == pytest.approx(100 * 1e-6 * device.kernel_floor_us)


FORMULAS = [
    ("all_gather", Placement(8, 8), 7 / 8 * 1e9 / 100e9 + 1e-6 * (10 + 7)),
    ("all_reduce", Placement(8, 8), 2 * 7 / 8 * 1e9 / 100e9 + 1e-6 * (10 + 14)),
    # There is one rank on each of four nodes, and each rank uses one network adapter.
    ("reduce_scatter", Placement(4, 1), 3 / 4 * 1e9 / 10e9 + 1e-6 * (20 + 2 * 5)),
    # All eight ranks of two nodes use eight adapters with 80 GB/s, which is slower than the node's 100 GB/s.
    ("all_gather", Placement(16, 8), 15 / 16 * 1e9 / 80e9 + 1e-6 * (20 + 5)),
    ("all_to_all", Placement(8, 8), 7 / 8 * 1e9 / 100e9 + 1e-6 * (10 + 7)),
    ("all_to_all", Placement(16, 8), 8 / 16 * 1e9 / 10e9 + 1e-6 * (20 + 5)),
    ("send", Placement(2, 1), 1e9 / 10e9 + 1e-6 * (20 + 5)),
    ("send", Placement(2, 2), 1e9 / 100e9 + 1e-6 * (10 + 1)),
    ("all_reduce", Placement(1, 1), 0.0),
]


@pytest.mark.parametrize(("kind", "group", "seconds"), FORMULAS)
def test_collectives_follow_their_formulas(device: DeviceFile, kind: str, group: Placement, seconds: float) -> None:
    assert Network(device, 8).seconds(kind, 10**9, group) == pytest.approx(seconds)


def test_ranks_that_share_an_adapter_share_its_rate(device: DeviceFile) -> None:
    found = Network(replace(device, adapters_per_node=1), 8).seconds("all_gather", 10**9, Placement(4, 1))
    assert found == pytest.approx(8 * 3 / 4 * 1e9 / 10e9 + 1e-6 * (20 + 2 * 5))


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_long_steps_are_extrapolated_exactly(name: str) -> None:
    chunks = 2 if name in ("interleaved", "zb-v") else 1
    layout = PipelineLayout(4, chunks, name == "zb-v")
    times = [1.0 + 0.1 * stage for stage in range(layout.num_stages)]
    costs = StageCosts(forward=times, input_grad=times, weight_grad=times, comm=0.2)
    lists = build_schedule(name, 4, 43 if chunks == 1 else 44, chunks)
    ends, _ = Schedule(name, layout).times(costs, 43 if chunks == 1 else 44)
    whole = simulate(lists, costs)
    assert ends == pytest.approx([timed[-1].stop for timed in whole.timeline])


MODEL = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 4 --swiglu "
    "--normalization RMSNorm --disable-bias-linear --seq-length 1024 --vocab-size 8192 --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --lr 1e-4 --train-iters 10 --mock-data --micro-batch-size 1 "
    "--global-batch-size 32 "
)
LAYOUTS = [
    "",
    "--tp 2 --sequence-parallel --pp 2",
    needs(
        "overlap", "--tp 2 --sequence-parallel --tp-comm-overlap --cp 2 --overlap-grad-reduce --overlap-param-gather"
    ),
    "--pp 4 --num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full --recompute-method uniform",
    "--pp 2 --pipeline-schedule zb-h1 --data-parallel-sharding-strategy optim_grads_params",
    "--num-experts 4 --moe-router-topk 2 --ep 4 --moe-grouped-gemm",
    "--fp8-format hybrid --fp8-recipe delayed",
]


def predicted(flags: str, device: DeviceFile, gpus_per_node: int = 4) -> StepTime:
    config = resolve(parse_args((MODEL + flags).split()), 8)
    assert [str(problem) for problem in validate(config, 8)] == []
    return predict_step(config, 8, device, gpus_per_node, CACHE)


@pytest.mark.parametrize("flags", LAYOUTS)
def test_parts_sum_to_the_step_and_faster_hardware_never_makes_it_longer(flags: str) -> None:
    device = read_device("h100")
    step = predicted(flags, device)
    assert set(step.parts) == set(SUBJECTS)
    assert sum(step.parts.values()) == pytest.approx(step.seconds)
    assert min(step.parts.values()) >= -1e-12
    assert (step.parts_of_pp_rank is None) == ("--pp" not in flags)
    assert step.tokens_per_second == pytest.approx(32 * 1024 / step.seconds)
    faster = {name: replace(link, gb_per_second=2 * link.gb_per_second) for name, link in device.links.items()}
    for better in (
        replace(device, links=faster),
        replace(device, copy_tb_per_second=2 * device.copy_tb_per_second),
        replace(device, host_launch_us=1.0),
    ):
        assert predicted(flags, better).seconds <= step.seconds * (1 + 1e-9)
    assert predicted(flags, device, gpus_per_node=8).seconds <= step.seconds * (1 + 1e-9)


def test_an_uneven_pipeline_is_bound_by_its_busiest_rank() -> None:
    """The first pipeline rank has only one of the eight layers, but is the last rank to finish the step. This rank is
    idle most of the time, but its idle time does not limit the step."""
    device = replace(read_device("h100"), step_overhead_ms=0.0, ranks_overhead_ms=0.0)
    step = predicted("--pp 2 --decoder-first-pipeline-num-layers 1", device)
    assert step.parts["pipeline_bubble"] < 0.5 * step.bubble * step.seconds and step.bubble > 0.1
    assert predicted("", read_device("h100")).bubble == 0.0
    lines = [*step_lines(step)]
    assert f"mean bubble {step.bubble:.1%} of the whole step: " in "\n".join(lines)
    (own,) = (line.split() for line in lines if "bubble of this rank" in line)
    assert own[-1] == f"{step.parts['pipeline_bubble'] / step.seconds:.1%}"
    assert sum(step.parts.values()) == pytest.approx(step.seconds)


def test_the_peak_is_that_of_the_precision_of_products() -> None:
    device = replace(read_device("h100"), peak_tflops={"bf16": 1000.0, "fp32": 500.0})
    plain, unknown = (predicted("--no-bf16", each) for each in (device, replace(device, peak_tflops={"bf16": 1000.0})))
    assert plain.mfu == pytest.approx(plain.tflops / 500) and unknown.mfu is None
    assert predicted("", device).mfu == pytest.approx(predicted("", device).tflops / 1000)


def test_a_device_without_a_link_is_named() -> None:
    device = replace(read_device("h100"), links={"node": LINKS["node"]})
    assert predicted("--tp 4 --sequence-parallel", device, 8).seconds > 0
    with pytest.raises(ValueError, match="has no link network"):
        predicted("--tp 2 --sequence-parallel --pp 2", device, 2)


OF_INDUCTOR = {
    "bf16": ("bf16", "", 0.06),
    "fp8 delayed": ("fp8", "", 0.08),
    "fp8 rowwise": ("fp8", "rowwise", 0.04),
    "experts": ("bf16", "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm", 0.16),
}
"""Tuples (precision, fp8 recipe or further flags, relative tolerance), keyed by the name of a run in
tests/fixtures/gpu_bytes.json. The tolerance applies to the bytes that element-wise kernels move."""


@pytest.mark.parametrize("run", OF_INDUCTOR)
def test_layer_bytes_match_compiled_kernels(run: str) -> None:
    precision, more, tolerance = OF_INDUCTOR[run]
    recipe, flags = (more or "delayed", "") if precision == "fp8" else ("", more)
    given = PRECISIONS[precision].format(format="hybrid", recipe=recipe)
    config = config_of(SHAPES["tiny"], 2, 1, f"{given} {flags}")
    batch = replace(MicroBatch.of(config), device="cuda", parallel=replace(config.parallel, cpu=False, compile=None))
    ((layer, _),) = CACHE.parts_of(batch, [Stage(range(2), False, False)])
    events = layer.forward + layer.backward
    golden = json.loads(GPU_BYTES.read_text())["runs"][run]["layer"]
    apart = ("GEMMs", "weight-gradient sums", "attention", "optimizer")
    expected = sum(read + written for group, (_, read, written, _) in golden.items() if group not in apart)
    moved = sum(event.moved for event in events if isinstance(event, Move))
    assert moved == pytest.approx(expected, rel=tolerance)
    products = [event for event in events if isinstance(event, Product)]
    assert sum(2 * each.m * each.n * each.k * each.batches for each in products) == golden["GEMMs"][3]


WIDE = (
    "--num-layers 1 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --vocab-size 1024 --lr 1e-3 --bf16 "
    "--train-iters 1 --mock-data --global-batch-size 1 --tp 8 --sequence-parallel --disable-bias-linear"
)


@pytest.mark.parametrize("precision", [needs("overlap", ""), needs("overlap", "--fp8-format hybrid")])
def test_overlapped_collectives_split_gemms(precision: str) -> None:
    """With --tp-comm-overlap, each GEMM is split into several concurrent GEMMs. These GEMMs write their outputs and do
    not accumulate into them. The total FLOPs do not change. In fp8, gathers move half as many bytes."""

    def events(flags: str) -> list[Event]:
        batch = MicroBatch.of(resolve(parse_args(f"{WIDE} {precision} {flags}".split()), 8))
        (stage,) = CACHE.parts_of(batch, [Stage([0], False, False)])
        return [event for part in stage for event in part.every]

    plain, parts = events(""), events("--tp-comm-overlap")
    work = [sum(e.m * e.n * e.k for e in each if isinstance(e, Product)) for each in (plain, parts)]
    assert work[0] == work[1]
    together = [event for event in parts if isinstance(event, Product) and event.at_one_time == 8]
    assert len(together) == 6 * 8 and not any(event.sums for event in together)
    sent = [event.moved for event in parts if isinstance(event, Collective) and event.kind == "send"]
    of_part = 4096 // 8 * 2048
    assert sorted(set(sent)) == ([of_part, 2 * of_part] if precision else [2 * of_part])


def test_the_default_nodes_are_those_that_the_flag_may_name() -> None:
    argv = f"{MODEL} --dp 12 --global-batch-size 12 --device h100 --dry-run --world-size 12".split()
    config = resolve(parse_args(argv), 12)
    step = predict_step(config, 12, read_device("h100"), None)
    assert step.gpus_per_node == 6 and step == predict_step(config, 12, read_device("h100"), 6)
    asked = command_line([*argv, "--gpus-per-node", "6"], Launch()).command
    assert isinstance(asked, DryRun) and asked.gpus_per_node == 6


def test_heads_exchanged_within_nodes_send_less_between_them(device: DeviceFile) -> None:
    nested = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 4 2"
    times = [predicted(f"--cp 8 {more}", device).parts["cp_communication"] for more in (nested, "--cp-comm-type p2p")]
    assert 0 < times[0] < times[1]
