"""Tests of fitting device files to measured times. The fit is exact for times that follow the model. A device file that
is written and read again contains the same values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.extensions.plan.planner.calibration import fit
from megatron.extensions.plan.planner.calibration.fit import fit_steps
from megatron.extensions.plan.planner.calibration.measure import CPU, KINDS, Clock, Sizes, measure, measure_links
from megatron.extensions.plan.planner.device_file import DeviceFile, Link, read_device, tile_share
from megatron.extensions.plan.planner.time.events import Attention, Product
from megatron.extensions.plan.planner.time.replay import Network, Placement
from tests.harness import run_world
from tools import calibrate

SHAPES = [(m, n, k) for m in (256, 4096) for n, k in ((512, 512), (4096, 1024), (1024, 4096))]


def seconds(us: float) -> float:
    return 1e-6 * us


@pytest.fixture(scope="module")
def h100() -> DeviceFile:
    return replace(read_device("h100"), kernel_floor_us=0.0)


def measured(device: DeviceFile) -> fit.Measured:
    """Return the measurements that a device with the constants in `device` would give."""
    kernel, width, lengths = "flash", 128, (512, 2048, 8192)

    def attention(length: int, way: bool) -> tuple[Attention, float]:
        flops = 1e6 * length**2
        took = seconds(device.attention_us(kernel, width, flops, length, way))
        return Attention(kernel, width, flops, length, way), took

    return fit.Measured(
        tuple((Product("bf16", m, n, k), seconds(device.gemm_us("bf16", m, n, k))) for m, n, k in SHAPES),
        tuple(attention(length, way) for length in lengths for way in (False, True)),
        tuple((size, seconds(device.memory_us(size))) for size in (10**6, 10**7, 10**8)),
        2e-6,
    )


def test_the_fit_recovers_device_constants(h100: DeviceFile) -> None:
    filled = {(m, n): tile_share(m, n, h100.multiprocessors) for m, n, _ in SHAPES}
    about = {"name": "one", "multiprocessors": h100.multiprocessors, "memory_gib": 80.0, "capability": (9, 0)}
    found = fit.device_file(measured(h100), filled, **about)
    for name in ("tflops", "half_depth"):
        assert getattr(found.gemm["bf16"], name) == pytest.approx(getattr(h100.gemm["bf16"], name), rel=1e-6)
    known = h100.attention["flash"][128]
    assert found.attention["flash"][128].forward == pytest.approx(known.forward, rel=1e-6)
    assert found.attention["flash"][128].backward == pytest.approx(known.backward, rel=1e-6)
    assert found.copy_tb_per_second == pytest.approx(h100.copy_tb_per_second)
    assert max(fit.errors(replace(found, kernel_floor_us=0.0), measured(h100)).values()) < 1e-6


def test_steps_on_a_cpu_are_not_checked_for_element_wise_operations(h100: DeviceFile) -> None:
    cpu = replace(h100, capability=None)
    assert set(fit.errors(h100, measured(h100))) - set(fit.errors(cpu, measured(h100))) == {"element-wise"}


def test_a_file_that_cannot_be_written_is_reported_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.yaml").mkdir()
    for path in (tmp_path / "file" / "mine.yaml", tmp_path / "folder.yaml"):
        refused = pytest.raises(ValueError, match=f"--output {path}: ")
        with mock.patch("tools.calibrate.calibrate", side_effect=AssertionError), refused:
            calibrate.main(["--output", str(path), "--cpu"])


def test_the_fit_recovers_link_rates_and_latencies(h100: DeviceFile) -> None:
    known = {"node": Link(0.4, 30.0, 200.0, {"send": 1.5}), "network": Link(0.0125, 100.0, 400.0, {"all_to_all": 0.5})}
    device = replace(h100, links=known, ranks_per_node=2, adapters_per_node=1)
    network = Network(device, 2)
    places = {"node": Placement(2, 2), "network": Placement(2, 1)}
    points = [
        fit.CollectiveTime(link, kind, 2, moved, network.seconds(kind, moved, places[link]))
        for link in known
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        for moved in (4096, 65536, 1 << 20)
    ]
    found = fit.links_of(points, 2)
    for link, expected in known.items():
        assert found[link].gb_per_second == pytest.approx(expected.gb_per_second, rel=1e-3)
        assert found[link].latency_us == pytest.approx(expected.latency_us, rel=1e-3)
        assert found[link].launch_us == pytest.approx(expected.launch_us, rel=1e-3)
        for kind in KINDS:
            assert found[link].share.get(kind, 1.0) == pytest.approx(expected.share.get(kind, 1.0), rel=1e-3)


def test_the_fit_recovers_constants_of_whole_steps(h100: DeviceFile) -> None:
    def step(operations: int, moved: float, products: float) -> object:
        def predict(device: DeviceFile) -> float:
            us = products + operations * device.launch_gap_us + device.memory_us(moved)
            return seconds(us) + 1e-3 * device.step_overhead_ms

        return predict

    known = replace(h100, capability=None, copy_tb_per_second=0.004, launch_gap_us=12.0, step_overhead_ms=3.0)
    steps = [step(500, 1e9, 1e5), step(2000, 1e9, 4e5), step(2000, 5e8, 2e4)]
    start = replace(known, copy_tb_per_second=0.01, launch_gap_us=0.0, step_overhead_ms=0.0)
    found = fit_steps(start, [(each, each(known)) for each in steps])  # type: ignore[arg-type, operator]
    for name in ("copy_tb_per_second", "launch_gap_us", "step_overhead_ms"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-6)
    on_gpu = replace(known, capability=(9, 0), step_overhead_ms=0.0)
    slower = [(each, each(on_gpu) + 0.004) for each in steps]  # type: ignore[operator]
    assert fit_steps(on_gpu, slower).step_overhead_ms == pytest.approx(4.0)  # type: ignore[arg-type]


def test_the_fit_never_gives_negative_constants() -> None:
    assert fit.line([[1.0, 1.0], [1.0, 2.0]], [2.0, 1.0])[1] == 0.0
    first, second = fit.line([[1.0, 1.0], [2.0, 1.0]], [2.0, 1.0])
    assert first > 0 and second == 0.0


def _products(*rates: float) -> fit.Measured:
    """Return measurements in which GEMMs of depths 8, 16, and so on reach these rates in TFLOP/s. The measurements of
    copies and attention are taken from the device file h100."""
    depths = range(8, 8 * len(rates) + 8, 8)
    products = ((Product("bf16", 8, 8, k), 2e-12 * 8 * 8 * k / rate) for k, rate in zip(depths, rates, strict=True))
    return replace(measured(read_device("h100")), products=tuple(products))


@pytest.mark.parametrize("rates", [(1.0, 3.0), (1.0, 1.9), (3.0, 1.0), (2.0, 2.0), (1.0, 2.0, 0.01, 4.0)])
@pytest.mark.parametrize("peak", [None, 1.5])
def test_a_file_of_any_rates_can_be_read(rates: tuple[float, ...], peak: float | None, tmp_path: Path) -> None:
    about: dict[str, object] = {} if peak is None else {"peak_tflops": {"bf16": peak}}
    device = fit.device_file(_products(*rates), {}, name="one", multiprocessors=1, memory_gib=1.0, **about)
    (tmp_path / "mine.yaml").write_text(fit.text_of(device, []))
    read = read_device(str(tmp_path / "mine.yaml"))
    assert read.gemm["bf16"].tflops <= read.peak_tflops["bf16"]
    if peak is None:
        assert read.peak_tflops["bf16"] >= max(rates) * 0.99


def test_a_fit_above_the_known_peak_is_clamped_and_refitted() -> None:
    speed = fit.gemm_speed(_products(1.0, 1.5).products, [0.5, 0.5], 2.0)
    # Half of the device reaches at least half of the peak, so the fitted rate is limited to the peak.
    assert speed.tflops == 2.0 and speed.half_depth == 0.0
    speed = fit.gemm_speed(_products(*(2.0 * k / (k + 40) for k in range(8, 80, 8))).products, [1.0] * 9, 1.8)
    assert speed.tflops == 1.8 and 20 < speed.half_depth < 40


def _measured(rank: int, world_size: int) -> tuple[object, ...]:
    sizes = Sizes(((8, 8, 8), (8, 8, 16)), (16, 32), (16,), (8, 16), 32, (64, 256))
    clock = Clock(torch.device("cpu"), 0.0002, rounds=1)
    found = measure(clock, sizes, ["fp32"])
    points, slowdown = measure_links(clock, sizes, 1)
    assert dist.get_world_size() == world_size
    return found, points, slowdown


def test_ranks_measure_together_and_the_written_file_reads_back(tmp_path: Path) -> None:
    (found, points, slowdown), other = run_world(2, _measured)
    # both ranks have the same result, which is the mean of their measurements
    assert other == (found, points, slowdown)
    assert {(point.link, point.kind) for point in points} == {("network", kind) for kind in KINDS}
    assert 0 <= slowdown <= 1 and len(found.products) == 2 and {each.backward for each, _ in found.attention} == {0, 1}
    device = fit.device_file(found, {}, name="two processes", multiprocessors=1, memory_gib=1.5)
    device = replace(device, links=fit.links_of(points, 1), ranks_per_node=1)
    path = tmp_path / "mine.yaml"
    path.write_text(fit.text_of(device, ["measured here"]))
    read = read_device(str(path))
    assert read.device_type == "cpu" and read.links.keys() == {"network"}
    assert fit.text_of(read, ["measured here"]) == path.read_text()
    assert len(CPU.products) > 4
