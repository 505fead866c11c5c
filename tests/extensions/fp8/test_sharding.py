"""Test that the results of ZeRO-2 and ZeRO-3 are bit-identical to those of ZeRO-1, with fp8 layers, low-precision
optimizer states and a fused residual stream.

With one micro-batch per rank, all sharding strategies add the same gradients in the same order, so their results are
bit-identical.
"""

from __future__ import annotations

import pytest

from megatron.testing.snapshot import first_difference
from tests.extensions import needs
from tests.extensions.fp8.test_parity import EXPERTS, RECIPES, WIDE_EXPERTS, third_step

STRATEGY = "--data-parallel-sharding-strategy"
SHARDED = ("optim_grads", "optim_grads_params")
STATES_IN_FP8 = "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8"
OF_FP8 = [
    *((recipe, 2, "--micro-batch-size 4") for recipe in RECIPES),
    ("delayed", 4, "--tp 2 --sequence-parallel --micro-batch-size 4"),
    ("delayed", 4, "--pp 2 --pipeline-schedule zb-v --micro-batch-size 4"),
    ("delayed", 4, "--num-distributed-optimizer-instances 2 --micro-batch-size 2"),
    ("delayed", 2, "--micro-batch-size 4 --mtp-num-layers 1 --untie-embeddings-and-output-weights"),
    needs("optimizers", ("delayed", 2, "--micro-batch-size 4 --optimizer muon")),
    needs("optimizers", ("delayed", 2, f"--micro-batch-size 4 {STATES_IN_FP8}")),
    ("rowwise", 4, f"{EXPERTS} --ep 2 --micro-batch-size 2"),
    ("blockwise", 4, f"{WIDE_EXPERTS} --ep 2 --micro-batch-size 2"),
    ("delayed", 4, "--cp 2 --micro-batch-size 4"),
]


@pytest.mark.grid("case", [("delayed", 2, "--micro-batch-size 4")], OF_FP8)
def test_fp8_layers_compute_the_same_bits(case: tuple[str, int, str]) -> None:
    """The test compares all values of the third step, including amax histories. The first two steps do not read the
    weights, so that fp8 casts are freed together with the weights."""
    recipe, ranks, layout = case
    plain = third_step(recipe, ranks, layout)
    histories = [key for key in plain.tensors if key.endswith("amax_history")]
    assert bool(histories) == (recipe == "delayed")
    for strategy in SHARDED:
        assert first_difference(third_step(recipe, ranks, f"{layout} {STRATEGY} {strategy}"), plain, 0.0) is None, (
            strategy
        )
