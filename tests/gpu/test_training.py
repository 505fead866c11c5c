"""Tests that compare training on GPUs with training on the CPU. Each run is a separate process, so that the pytest
process never touches CUDA and other tests can fork."""

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
    "--attention-dropout 0 --extension tests/gpu/limit_of_variants.py"
).split()


def losses(metrics: Path, processes: int, *flags: str) -> list[float]:
    return [record["lm_loss"] for record in records(metrics, processes, *flags)]


def gradient_norms(metrics: Path, *flags: str) -> dict[str, float]:
    """Train one step, and return the gradient norm of each parameter, keyed by name."""
    found, _ = records(metrics, 1, *flags, "--train-iters", "1", "--log-layer-stats", "1")
    return {name: values["grad_norm"] for name, values in found["parameters"].items()}


def records(metrics: Path, processes: int, *flags: str) -> list[dict[str, Any]]:
    """Train under torchrun, and return the records that the run writes to the file `metrics`."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = python_apart(*launcher, "pretrain_gpt.py", *FLAGS, *flags, "--metrics-file", str(metrics))
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("cpu") / "metrics.jsonl", 1, "--cpu")


SP = "--tp 2 --sequence-parallel"


@pytest.mark.parametrize(
    ("processes", "flags", "tolerance"),
    [
        (1, "--fp32", 1e-3),
        (1, "--bf16", 2e-2),
        # with a larger loss scale, gradients would overflow and the first steps would be skipped
        (1, "--fp16 --initial-loss-scale 4096", 2e-2),
        *((1, f"--bf16 --attention-backend {backend}", 2e-2) for backend in ("flash", "cudnn", "unfused")),
        *((2, flags, 1e-3) for flags in (SP, "--pp 2", "--dp 2", "--cp 2", "--dp 2 --cuda-graph-impl local")),
        needs("overlap", 2, f"{SP} --tp-comm-overlap", 1e-3),
        needs("overlap", 2, f"{SP} --tp-comm-overlap --tp-comm-overlap-method symmetric", 1e-3),
        *((2, f"--distributed-backend gloo {flags}", 1e-3) for flags in (SP, "--dp 2")),  # two ranks share a GPU
        needs("overlap", 2, f"--distributed-backend gloo {SP} --tp-comm-overlap", 1e-3),
    ],
)
def test_losses_match_the_cpu(
    processes: int, flags: str, tolerance: float, on_cpu: list[float], tmp_path: Path
) -> None:
    if processes > torch.cuda.device_count() and "gloo" not in flags:
        pytest.skip("needs two GPUs")
    assert losses(tmp_path / "metrics.jsonl", processes, *flags.split()) == pytest.approx(on_cpu, rel=tolerance)


GRAPHS, STATES = "--cuda-graph-impl local", "--optimizer-cpu-offload --optimizer-offload-fraction 0.6"
WEIGHTS = "--optimizer-cpu-offload --offload-weights"
FUSIONS = "--attention-backend auto"
ACTIVATIONS = "--cpu-offloading --cpu-offloading-num-layers 3 --min-offloaded-tensor-size 1024"


@pytest.mark.parametrize(
    ("flags", "more", "tolerance"),
    [
        ("--fp32", GRAPHS, 0),
        ("--bf16", GRAPHS, 0),
        ("--bf16", f"{GRAPHS} {FUSIONS}", 1e-3),
        ("--fp16 --initial-loss-scale 4096", GRAPHS, 0),
        ("--bf16 --hidden-dropout 0.1", GRAPHS, 0),
        ("--fp32", STATES, 1e-4),
        ("--bf16", STATES, 1e-2),
        ("--bf16 --use-precision-aware-optimizer", STATES, 1e-2),
        ("--fp32", WEIGHTS, 1e-4),
        ("--bf16 --recompute-granularity full --recompute-method uniform", WEIGHTS, 1e-2),
        ("--fp32", ACTIVATIONS, 0),
        ("--bf16 --recompute-granularity selective --recompute-modules layernorm", ACTIVATIONS, 0),
    ],
)
def test_graphs_and_offloading_train_alike(flags: str, more: str, tolerance: float, tmp_path: Path) -> None:
    """Runs with CUDA graphs and offloaded activations are bit-identical to runs without them."""
    shared = [*flags.split(), "--micro-batch-size", "2", "--train-iters", "8", "--global-batch-size", "8"]
    if FUSIONS not in more:  # with fusions, two runs could choose different kernels at startup
        shared += ["--no-fusions", *([] if "--fp32" in flags else ["--attention-backend", "flash"])]
    plain = losses(tmp_path / "plain.jsonl", 1, *shared)
    assert losses(tmp_path / "other.jsonl", 1, *shared, *more.split()) == pytest.approx(plain, rel=tolerance, abs=0)


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-ffn-hidden-size 256"
).split()

INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 64 --dsa-indexer-topk 32 --dsa-indexer-loss-coeff 0.5"
LATENTS = "--multi-latent-attention --q-lora-rank 96 --qk-head-dim 64 --qk-pos-emb-head-dim 32 --qk-layernorm"
MIXERS = {
    "mamba": "--hybrid-layer-pattern MH*S --mamba-num-groups 2 --mamba-num-heads 8 --mamba-head-dim 64 "
    "--mamba-state-dim 32 --mamba1-state-dim 16",
    "delta nets": "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
    "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64",
    "kimi delta": "--experimental-attention-variant kimi_delta_attention --linear-attention-freq 2 --kda-num-heads 4 "
    "--kda-head-dim 64",
    "lightning": "--experimental-attention-variant lightning_attention --linear-attention-freq 2",
    "rg-lru": "--experimental-attention-variant rg_lru --linear-attention-freq 2 --rg-lru-num-blocks 4",
    "convolutions": "--experimental-attention-variant short_convolution --linear-attention-freq 2",
    "sparse": f"{LATENTS} --kv-lora-rank 64 --v-head-dim 64 --experimental-attention-variant dsa {INDEXER}",
    "compressed": f"{LATENTS} --v-head-dim 96 --experimental-attention-variant dsv4_hybrid {INDEXER} "
    "--csa-compress-ratios [4,16,4,0] --csa-window-size 32 --csa-compress-rotary-base 500 --o-groups 2 "
    "--o-lora-rank 64",
}


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ("--fp32", 2e-3),
        ("--bf16", 1e-2),
        ("--bf16 --normalization LayerNorm --no-swiglu", 1e-2),
        (f"--fp32 {' '.join(EXPERTS)}", 1e-2),
        (f"--bf16 {' '.join(EXPERTS)}", 5e-2),
        *((f"--fp32 {flags}", 1e-2) for flags in MIXERS.values()),
        *((f"--bf16 {flags}", 0.2) for flags in MIXERS.values()),
    ],
)
def test_each_parameter_has_the_same_gradient_as_on_the_cpu(flags: str, tolerance: float, tmp_path: Path) -> None:
    """The test compares gradient norms, because the losses of a few steps hardly depend on whether each parameter
    receives its gradient."""
    model = [flag for flag in flags.split() if flag not in ("--fp32", "--bf16")]
    on_cpu = gradient_norms(tmp_path / "cpu.jsonl", *model, "--cpu")
    assert min(on_cpu.values()) > 0
    assert gradient_norms(tmp_path / "gpu.jsonl", *flags.split()) == pytest.approx(on_cpu, rel=tolerance)


def test_attention_kernels_are_compared() -> None:
    done = python_apart("pretrain_gpt.py", *FLAGS, "--bf16")
    assert done.returncode == 0, done.stderr
    assert any(f" attention kernel: {name} (" in done.stdout for name in ("flash", "flash3", "cudnn")), done.stdout
