"""Between two log lines, a training step neither reads values from the device nor makes the host wait for the device.

A run on CPU makes the same torch calls as a run on a GPU. These tests therefore run on CPU and record every operation
that would make the host wait on a GPU: operations that read tensor values, that need tensor values to determine a
shape, or that copy Python numbers to the device. In `tests/gpu/test_host_waits.py`, torch itself reports such
operations on a GPU.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from megatron.core.tensor_parallel.layers import Hardware
from megatron.training.progress import Interval
from megatron.training.train_step import train_step
from tests.extensions import needs
from tests.harness import run_world, running
from tests.host_waits import HostWaits
from tests.tiny import TINY

COMMON = f"{TINY} --hidden-size 32 --seq-length 16 --vocab-size 100"
LLAMA = (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --group-query-attention --num-query-groups 2"
)
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
EXPERTS = "--disable-bias-linear --num-experts 4 --moe-router-topk 2"

HOST_ONLY = (
    "read_batches",  # samples are assembled on the host and copied from pinned memory
    "integers_on",  # copies from pinned memory
    "add_each_product_",  # reads row counts on the host; on a GPU, a kernel reads them
    "check_ids",  # reads ids on the CPU only; on a GPU, a device-side assertion checks them
)
VERDICT = Counter({"host_to_device.py:read tolist": 1})
"""The only read of device values that is expected in a step, and its count. The host reads the outcome of the previous
step, which consists of four numbers that are copied to the host at the end of that step. The host reads the numbers
while the gradients of the current step are computed, so it waits only for the copy."""


def waits(rank: int, world_size: int, flags: str) -> Counter[str]:
    """Return how often the host waits for the device in the third step, keyed by place in the code."""
    return Counter(watched_step(rank, world_size, flags)[0])


def watched_step(rank: int, world_size: int, flags: str) -> tuple[list[str], Counter[str]]:
    """Record the third training step of a run. Return the places in the code at which the host waits, and the number of
    calls of each torch operation."""
    with running(f"{COMMON} {flags}".split(), rank, world_size) as run:
        run.interval = Interval()
        for _ in range(2):
            train_step(run)
        with HostWaits(HOST_ONLY) as seen:
            train_step(run)
        run.optimizer.finish_param_sync()
        return seen.found, seen.calls


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (1, f"{LLAMA} --bf16 --window-size 6 --recompute-granularity full"),
        needs("diagnosis", 1, "--check-for-spiky-loss --check-for-large-grads --max-skipped-iterations 1"),
        (2, f"--tp 2 --sequence-parallel --bf16 {LLAMA}"),
        needs("overlap", 2, f"--tp 2 --sequence-parallel --tp-comm-overlap {LLAMA}"),
        needs("fp8", 1, "--bf16 --fp8-format hybrid --fp8-recipe delayed --ffn-hidden-size 64"),
        needs("fp8", 2, f"--bf16 --kv-channels 16 --fp8-format hybrid --fp8-recipe tensorwise --tp 2 {LLAMA}"),
        needs("fp8", 1, f"--bf16 --kv-channels 16 --fp8-format e4m3 --fp8-recipe blockwise {LLAMA}"),
        (2, f"--pp 2 --pipeline-schedule zb-h1 --micro-batch-size 1 {OVERLAP}"),
        (2, f"--dp 2 {OVERLAP} --grad-reduce-in-bf16"),
        (2, f"--cp 2 {LLAMA}"),
    ],
)
def test_a_step_waits_for_nothing(world_size: int, flags: str) -> None:
    for found in run_world(world_size, waits, flags):
        assert found == VERDICT


def test_a_dynamic_loss_scale_reads_once() -> None:
    (found,) = run_world(1, waits, "--fp16 --initial-loss-scale 1024")
    assert found == VERDICT, "the same four numbers, but those of the current step, which scale the next step"


@pytest.mark.parametrize("flags", ["--fp32", "--bf16 --dp 2"])
def test_an_update_is_one_launch_for_each_weight_decay(flags: str) -> None:
    """On a GPU, a fused update launches a single kernel for all its tensors, so the number of launches does not depend
    on the number of buckets."""
    world_size = 2 if "--dp 2" in flags else 1
    for _, calls in run_world(world_size, watched_step, f"{flags} --ddp-bucket-size 700"):
        assert calls["_fused_adamw_"] == 2, "one call for matrices, and one for biases and norms, which do not decay"
        assert calls["_foreach_mul_"] == 0, "the fused kernel divides by the number of tokens and clips"


ALLTOALL = "--moe-token-dispatcher-type alltoall"
CAPACITY = "--moe-expert-capacity-factor 1"


@pytest.mark.parametrize(
    ("flags", "reads"),
    [
        (f"--dp 2 {EXPERTS} {ALLTOALL} --moe-shared-expert-intermediate-size 16", 0),
        (f"--tp 2 --sequence-parallel {EXPERTS} {ALLTOALL} {CAPACITY}", 0),
        (f"--dp 2 --ep 2 {EXPERTS}", 0),
        (f"--dp 2 --ep 2 {EXPERTS} {CAPACITY}", 0),
        (f"--dp 2 --ep 2 {EXPERTS} {ALLTOALL} {CAPACITY} --moe-pad-expert-input-to-capacity", 0),
        (f"--dp 2 --ep 2 {EXPERTS} {ALLTOALL}", 1),
    ],
)
def test_experts_wait_only_for_sizes_of_all_to_all_messages(
    flags: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, the numbers of rows per expert stay on the device. Each expert layer reads the sizes of its messages
    from the device `reads` times per micro-batch. The host computes index tensors from these sizes, and `integers_on`
    and `copied_to` copy them from pinned memory to the device."""
    monkeypatch.setattr(Hardware, "host_waits_for", lambda self, x: True)
    for found in run_world(2, waits, f"{flags} --bf16 --moe-grouped-gemm"):
        assert found == VERDICT + Counter({"host_to_device.py:read tolist": 2 * 2 * reads})


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_without_grouped_gemms_experts_wait(dispatcher: str) -> None:
    """Without grouped GEMMs, the host waits for the device once per expert layer and micro-batch."""
    for found in run_world(2, waits, f"--dp 2 --ep 2 {EXPERTS} --moe-token-dispatcher-type {dispatcher}"):
        assert found == VERDICT + Counter({"host_to_device.py:read tolist": 4})


def test_waiting_calls_are_detected() -> None:
    x = torch.arange(4.0)
    with HostWaits() as seen:
        for wait in (
            lambda: x.sum().item(),
            lambda: bool((x > 1).any()),
            lambda: float(x[0]),
            lambda: x[x > 1],
            lambda: x.nonzero(),
            lambda: x.tolist(),
            lambda: torch.tensor([1, 2]),
            lambda: x[[0, 2]],
            lambda: torch.where(x > 1),
        ):
            before = len(seen.found)
            wait()
            assert len(seen.found) > before
        before = len(seen.found)
        torch.where(x > 1, x, 0.0).cumsum(0).index_select(0, torch.arange(2)).clamp(max=1.0).to(torch.float64)
        assert len(seen.found) == before
