"""Each device file can be read, and predictions for the device follow from the numbers in the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS
from megatron.extensions.plan.planner.device_file import FOLDER, DeviceFile, device_names, read_device
from megatron.training.metrics.summary import PEAK_TFLOPS_16BIT, peak_of_model


@pytest.fixture
def h100() -> DeviceFile:
    return read_device("h100")


@pytest.mark.parametrize("name", device_names())
def test_peaks_match_those_of_the_mfu(name: str) -> None:
    device = read_device(name)
    assert device.peak_tflops["bf16"] == peak_of_model(device.name, PEAK_TFLOPS_16BIT)
    assert device.peak_tflops.get("fp8") == peak_of_model(device.name, LINEAR_FORMATS.facts("fp8").peak_tflops)
    assert set(device.peak_tflops) <= set(device.gemm)


def test_a_peak_is_found_only_by_the_whole_model_name() -> None:
    """The name of a laptop GPU contains the name of the desktop card, but the laptop GPU reaches only a third of the
    peak rate of the desktop card."""
    known = {
        "NVIDIA A100-SXM4-40GB": 312.0,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "NVIDIA GeForce RTX 4090 D": None,
        "NVIDIA GeForce RTX 3090 Ti": None,
        "NVIDIA H200": 989.4,
        "NVIDIA XH200": None,
    }
    assert {name: peak_of_model(name, PEAK_TFLOPS_16BIT) for name in known} == known


@pytest.mark.parametrize(
    ("precision", "size", "tflops"), [("bf16", 8192, 798), ("fp8", 8192, 1290), ("fp8", 16384, 1377)]
)
def test_predictions_match_the_fitted_gemms(h100: DeviceFile, precision: str, size: int, tflops: float) -> None:
    us = h100.gemm_us(precision, size, size, size)
    assert 2 * size**3 / us / 1e6 == pytest.approx(tflops, rel=0.03)


@pytest.mark.parametrize(
    ("kernel", "length", "tflops"), [("cudnn", 2048, 484), ("cudnn", 8192, 529), ("flash", 4096, 319)]
)
def test_predictions_match_the_fitted_attention(h100: DeviceFile, kernel: str, length: int, tflops: float) -> None:
    flops = 1e12
    us = h100.attention_us(kernel, 128, flops, length, backward=False)
    assert flops / us / 1e6 == pytest.approx(tflops, rel=0.02)


def test_short_inner_dims_and_partial_waves_slow_gemms(h100: DeviceFile) -> None:
    def rate(m: int, n: int, k: int) -> float:
        return 2 * m * n * k / h100.gemm_us("bf16", m, n, k)

    assert rate(8192, 8192, 512) < rate(8192, 8192, 8192)
    whole = 128 * 132  # number of rows whose tiles fill one wave
    assert rate(whole + 128, 256, 8192) < 0.7 * rate(whole, 256, 8192)
    assert h100.gemm_us("bf16", 16, 16, 16) == h100.kernel_floor_us
    assert h100.gemm_us("bf16", 1, 2**20, 4096, 64) < h100.gemm_us("bf16", 2, 2**20, 4096, 64) / 30
    assert h100.gemm_us("bf16", 256, 512, 4096, 64) < 64 * h100.gemm_us("bf16", 256, 512, 4096)


def test_bytes_move_at_the_copy_bandwidth(h100: DeviceFile) -> None:
    assert h100.memory_us(2.95e9) == pytest.approx(1000)
    assert h100.memory_us(1) == h100.kernel_floor_us
    assert replace(h100, copy_tb_per_second=5.9).memory_us(2.95e9) == pytest.approx(500)


def test_a_wrong_device_file_is_reported(tmp_path: Path, h100: DeviceFile) -> None:
    with pytest.raises(ValueError, match="no device h1000; known devices: a100, a100_40gb, b200, gh200, h100"):
        read_device("h1000")
    for name, said in (("no.yaml", "no such file: .*no.yaml$"), (".", " is a folder"), ("a.yml", " must end in .yaml")):
        (tmp_path / "a.yml").touch()
        with pytest.raises(ValueError, match=said):
            read_device(str(tmp_path / name))
    text = (FOLDER / "h100.yaml").read_text()
    own = tmp_path / "own.yaml"
    own.write_text(text.replace("multiprocessors: 132", "processors: 132"))
    with pytest.raises(ValueError, match=r"own.yaml: multiprocessors is missing"):
        read_device(str(own))
    own.write_text(text + "clock: 1\n")
    with pytest.raises(ValueError, match=r"own.yaml: clock is not one of adapters_per_node, attention, cache_mib"):
        read_device(str(own))
    for case in yaml.safe_load(Path(__file__).with_name("wrong_devices.yaml").read_text(encoding="utf-8")):
        own.write_text(text.replace(case["old"], case["wrong"]) if case["old"] else case["wrong"])
        with pytest.raises(ValueError, match=rf"own.yaml.* ?{case['said']}"):
            read_device(str(own))
    own.write_text(text.replace("tflops: 868", "tflops: 868e0").replace("sustained: 0.90", "sustained: 90e-2"))
    assert read_device(str(own)) == h100
    with pytest.raises(ValueError, match="no speed of flash4 attention; known are cudnn, flash, flash3"):
        h100.attention_us("flash4", 128, 1e12, 4096, backward=False)


def test_default_nodes_have_equal_numbers_of_ranks(h100: DeviceFile) -> None:
    sizes = {world: h100.ranks_of_node(world) for world in (1, 4, 8, 12, 13, 20, 96)}
    assert sizes == {1: 8, 4: 8, 8: 8, 12: 6, 13: 1, 20: 5, 96: 8}
