"""Training on GPUs against training on the CPU. Each run is a process of its own, so that this one never touches CUDA
and the other tests can fork."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.apart import python_apart
from tests.extensions import needs

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 0, reason="needs a GPU")

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --mock-data "
    "--global-batch-size 8 --train-iters 5 --lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0 "
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0"
).split()


def losses(metrics: Path, processes: int, *flags: str) -> list[float]:
    return [record["lm_loss"] for record in records(metrics, processes, *flags)]


def gradient_norms(metrics: Path, *flags: str) -> dict[str, float]:
    """Of the first step's gradients, by parameter."""
    found, _ = records(metrics, 1, *flags, "--train-iters", "1", "--log-layer-stats", "1")
    return {name: values["grad_norm"] for name, values in found["parameters"].items()}


def records(metrics: Path, processes: int, *flags: str) -> list[dict[str, Any]]:
    """The lines that a run writes to `metrics`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = python_apart(*launcher, "pretrain_gpt.py", *FLAGS, *flags, "--metrics-file", str(metrics))
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu") / "metrics.jsonl", 1, "--cpu")


@pytest.mark.parametrize(("precision", "tolerance"), [("--fp32", 1e-3), ("--bf16", 2e-2), ("--fp16", 2e-2)])
def test_losses_are_those_of_the_cpu(precision: str, tolerance: float, on_cpu: list[float], tmp_path: Path) -> None:
    # A loss scale that overflows would skip the first steps.
    scale = ["--initial-loss-scale", "4096"] if precision == "--fp16" else []
    assert losses(tmp_path / "metrics.jsonl", 1, precision, *scale) == pytest.approx(on_cpu, rel=tolerance)


@pytest.mark.parametrize(
    "flags", ["--fp32", "--bf16", "--fp16 --initial-loss-scale 4096", "--bf16 --hidden-dropout 0.1"]
)
def test_graphs_change_no_bit(flags: str, tmp_path: Path) -> None:
    shared = [*flags.split(), "--micro-batch-size", "2", "--train-iters", "8", "--global-batch-size", "8"]
    if "--fp32" not in flags:  # each process would take the kernel that is the fastest at its start
        shared += ["--attention-backend", "flash"]
    plain = losses(tmp_path / "plain.jsonl", 1, *shared)
    assert losses(tmp_path / "graphs.jsonl", 1, *shared, "--cuda-graph-impl", "local") == plain


@pytest.mark.parametrize(
    ("flags", "tolerance"), [("--fp32", 1e-4), ("--bf16", 1e-2), ("--bf16 --use-precision-aware-optimizer", 1e-2)]
)
def test_states_in_host_memory_train_alike(flags: str, tolerance: float, tmp_path: Path) -> None:
    plain = losses(tmp_path / "plain.jsonl", 1, *flags.split())
    offload = [*flags.split(), "--optimizer-cpu-offload", "--optimizer-offload-fraction", "0.6"]
    assert losses(tmp_path / "offload.jsonl", 1, *offload) == pytest.approx(plain, rel=tolerance)


@pytest.mark.parametrize("flags", ["--fp32", "--bf16 --recompute-granularity selective --recompute-modules layernorm"])
def test_offloaded_activations_change_no_bit(flags: str, tmp_path: Path) -> None:
    shared = [*flags.split(), "--micro-batch-size", "2", "--train-iters", "8", "--global-batch-size", "8"]
    shared += [] if "--fp32" in flags else ["--attention-backend", "flash"]
    offload = "--cpu-offloading --cpu-offloading-num-layers 3 --min-offloaded-tensor-size 1024".split()
    plain = losses(tmp_path / "plain.jsonl", 1, *shared)
    assert losses(tmp_path / "offloaded.jsonl", 1, *shared, *offload) == plain


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-ffn-hidden-size 256"
).split()


@pytest.mark.parametrize(("precision", "tolerance"), [("--fp32", 1e-3), ("--bf16", 2e-2)])
def test_experts(precision: str, tolerance: float, tmp_path: Path) -> None:
    on_cpu = losses(tmp_path / "cpu.jsonl", 1, *EXPERTS, "--cpu")
    assert losses(tmp_path / "gpu.jsonl", 1, *EXPERTS, precision) == pytest.approx(on_cpu, rel=tolerance)


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ("--fp32", 2e-3),
        ("--bf16", 1e-2),
        ("--bf16 --normalization LayerNorm --no-swiglu", 1e-2),
        (f"--fp32 {' '.join(EXPERTS)}", 1e-2),
        (f"--bf16 {' '.join(EXPERTS)}", 5e-2),
    ],
)
def test_each_parameter_has_the_gradient_of_the_cpu(flags: str, tolerance: float, tmp_path: Path) -> None:
    """Losses of a few steps hardly tell whether a parameter has one."""
    model = [flag for flag in flags.split() if flag not in ("--fp32", "--bf16")]
    on_cpu = gradient_norms(tmp_path / "cpu.jsonl", *model, "--cpu")
    assert min(on_cpu.values()) > 0
    assert gradient_norms(tmp_path / "gpu.jsonl", *flags.split()) == pytest.approx(on_cpu, rel=tolerance)


@pytest.mark.parametrize("backend", ["flash", "cudnn", "unfused"])
def test_attention_kernels_agree(backend: str, on_cpu: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path / "metrics.jsonl", 1, "--bf16", "--attention-backend", backend)
    assert found == pytest.approx(on_cpu, rel=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_over_data_parallelism(on_cpu: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path / "metrics.jsonl", 2, "--dp", "2", "--cuda-graph-impl", "local")
    assert found == pytest.approx(on_cpu, rel=1e-3)


def test_attention_kernels_are_compared() -> None:
    done = python_apart("pretrain_gpt.py", *FLAGS, "--bf16")
    assert done.returncode == 0, done.stderr
    assert any(f" attention kernel: {name} (" in done.stdout for name in ("flash", "flash3", "cudnn")), done.stdout


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "layout",
    [
        "--tp 2 --sequence-parallel",
        needs("overlap", "--tp 2 --sequence-parallel --tp-comm-overlap"),
        needs("overlap", "--tp 2 --sequence-parallel --tp-comm-overlap --tp-comm-overlap-method symmetric"),
        "--pp 2",
        "--dp 2",
        "--cp 2",
    ],
)
def test_layouts_over_nccl(layout: str, on_cpu: list[float], tmp_path: Path) -> None:
    assert losses(tmp_path / "metrics.jsonl", 2, *layout.split()) == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize(
    "layout",
    ["--tp 2 --sequence-parallel", needs("overlap", "--tp 2 --sequence-parallel --tp-comm-overlap"), "--dp 2"],
)
def test_two_ranks_share_a_gpu_over_gloo(layout: str, on_cpu: list[float], tmp_path: Path) -> None:
    found = losses(tmp_path / "metrics.jsonl", 2, "--distributed-backend", "gloo", *layout.split())
    assert found == pytest.approx(on_cpu, rel=1e-3)
