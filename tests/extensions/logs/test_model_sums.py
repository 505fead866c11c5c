"""Test that the logged parameter norm and the logged number of zero gradients count each element of the model exactly
once under every layout."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron.extensions.observe.logs.meters import ModelSums
from megatron.training.train_step import train_step
from tests.harness import run_world, running
from tests.tiny import TINY

# The model has no biases, because gradients of key biases are zero up to rounding.
MODEL = (
    f"{TINY} --vocab-size 90 --fp64 --make-vocab-size-divisible-by 4 --attention-dropout 0 --hidden-dropout 0 "
    "--disable-bias-linear --untie-embeddings-and-output-weights --log-params-norm --log-num-zeros-in-grad "
)
EXPERTS = MODEL + "--num-experts 4 --moe-aux-loss-coeff 0.01 "


def counted(rank: int, world_size: int, flags: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return two dictionaries after one step: the logged values, and reference values. The reference is summed
    parameter by parameter, which is only correct in one process."""
    with running(flags.split(), rank, world_size) as run:
        train_step(run)
        (meter,) = (meter for meter in run.meters if isinstance(meter, ModelSums))
        sums = meter.take()
        assert sums is not None
        if world_size > 1:
            dist.all_reduce(sums)
        parameters = [p for stage in run.stages.values() for p in stage.parameters()]
        trained = [p for p in parameters if p.requires_grad]
        plain = {
            "params_norm": torch.cat([p.flatten() for p in parameters]).norm().item(),
            "num_zeros": float(sum((p.main_grad == 0).sum().item() for p in trained)),
        }
        return meter.report(sums, run.interval), plain


LAYOUTS = [
    (MODEL, ["--tp 2 --sequence-parallel", "--pp 2", "--no-use-distributed-optimizer", "--cp 2"]),
    (MODEL + "--freeze word_embeddings ", ["--pp 2", ""]),
    (EXPERTS, ["--ep 2", "--tp 2 --sequence-parallel --etp 1"]),
]


@pytest.mark.parametrize(("flags", "layouts"), LAYOUTS)
def test_every_layout_counts_the_same_as_one_process(flags: str, layouts: list[str]) -> None:
    logged, plain = run_world(1, counted, flags)[0]
    assert logged == pytest.approx(plain, rel=1e-12)
    assert "freeze" in flags or logged["num_zeros"] > 90 * 16 / 2  # unused embedding rows have zero gradients
    for layout in layouts:
        for found, _ in run_world(2, counted, flags + layout):
            assert found == pytest.approx(logged, rel=1e-9)
