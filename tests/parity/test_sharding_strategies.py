"""ZeRO-2 and ZeRO-3 beside fp8 layers, states in few bits and fused residual streams: the same bits as ZeRO-1.

With one micro-batch a rank all strategies add up the same gradients in the same order, so no rounding tells them apart.
"""

from __future__ import annotations

import pytest

from megatron.testing.snapshot import first_difference, train_in_world
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve, validate
from tests.parity.test_fp8 import EXPERTS, RECIPES, WIDE_EXPERTS, third_step
from tests.parity.test_precision_aware import AWARE, FORMATS, MODEL, MOMENTS

STRATEGY = "--data-parallel-sharding-strategy"
SHARDED = ("optim_grads", "optim_grads_params")
OF_FP8 = [
    *((recipe, 2, "--micro-batch-size 4") for recipe in RECIPES),
    ("delayed", 4, "--tp 2 --sequence-parallel --micro-batch-size 4"),
    ("delayed", 4, "--pp 2 --pipeline-schedule zb-v --micro-batch-size 4"),
    ("delayed", 4, "--num-distributed-optimizer-instances 2 --micro-batch-size 2"),
    ("delayed", 2, "--micro-batch-size 4 --mtp-num-layers 1 --untie-embeddings-and-output-weights"),
    ("delayed", 2, "--micro-batch-size 4 --optimizer muon"),
    ("delayed", 2, f"--micro-batch-size 4 {MOMENTS['fp8']}"),
    ("rowwise", 4, f"{EXPERTS} --ep 2 --micro-batch-size 2"),
    ("blockwise", 4, f"{WIDE_EXPERTS} --ep 2 --micro-batch-size 2"),
    ("delayed", 4, "--cp 2 --micro-batch-size 4"),
]


@pytest.mark.grid("case", [("delayed", 2, "--micro-batch-size 4")], OF_FP8)
def test_fp8_layers_compute_the_same_bits(case: tuple[str, int, str]) -> None:
    """In the third step, after two that nobody looked into: histories of the largest values, casts that are dropped
    with the weights, and all states."""
    recipe, ranks, layout = case
    plain = third_step(recipe, ranks, layout)
    histories = [key for key in plain.tensors if key.endswith("amax_history")]
    assert bool(histories) == (recipe == "delayed")
    for strategy in SHARDED:
        assert first_difference(third_step(recipe, ranks, f"{layout} {STRATEGY} {strategy}"), plain, 0.0) is None, (
            strategy
        )


OF_STATES = [
    *((2, f"--exp-avg-dtype {name} --exp-avg-sq-dtype {name}") for name in FORMATS),
    (2, "--no-store-param-remainders --exp-avg-dtype bf16"),
    (2, "--main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"),
    (4, "--pp 2 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"),
]


@pytest.mark.grid("case", OF_STATES[-2:-1], OF_STATES)
def test_states_in_few_bits_have_the_same_bits(case: tuple[int, str]) -> None:
    """Main parameters as remainders, whole and in fp16, under bf16 parameters that are gathered layer by layer."""
    ranks, formats = case
    flags = f"{MODEL} --bf16 {AWARE} {formats} --micro-batch-size 2 --clip-grad 0"
    plain, *sharded = (
        train_in_world(ranks, f"{flags} {STRATEGY} {strategy}".split(), 1, unseen=1) for strategy in ("optim", *SHARDED)
    )
    for found in sharded:
        assert not found.replica_errors
        keys = [key for key in plain.tensors if not key.endswith("grad_norm")]  # which is summed in another order
        assert [key for key in keys if not plain[key].equal(found[key])] == []


@pytest.mark.grid("name", ["fp8"], ["bf16", "fp16", "fp8"])
def test_states_in_few_bits_are_those_of_one_process(name: str) -> None:
    flags = f"{MODEL} --fp64 {MOMENTS[name]}"
    alone = train_in_world(1, flags.split())
    for strategy in SHARDED:
        found = train_in_world(2, f"{flags} {STRATEGY} {strategy}".split())
        assert first_difference(alone, found, 1e-9) is None, strategy


@pytest.mark.parametrize("strategy", SHARDED)
def test_sums_in_bf16_are_refused(strategy: str) -> None:
    flags = f"{MODEL} --bf16 {AWARE} --main-grads-dtype bf16 {STRATEGY} {strategy}"
    (problem,) = validate(resolve(parse_args(flags.split()), 2), 2)
    assert f"cannot be combined with {STRATEGY} {strategy}" in str(problem)
