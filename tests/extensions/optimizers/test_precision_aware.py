"""Tests of optimizer states with less than fp32 precision under every layout, and of gradient accumulation in bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.dropout import uniform_of
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, rounding_sum
from megatron.extensions.optim.optimizers.precision_aware import FORMATS, StoredState, join_master, split_master
from megatron.testing.reshard import Checkpoints
from megatron.testing.snapshot import first_difference, train_in_world
from megatron.training.config.arguments import parse_args
from tests.tiny import TINY

STRATEGY = "--data-parallel-sharding-strategy"
SHARDED = ("optim_grads", "optim_grads_params")

MODEL = f"{TINY} --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 2 --vocab-size 64 "
MODEL += "--attention-dropout 0 --hidden-dropout 0 --disable-bias-linear "
AWARE = "--use-precision-aware-optimizer "
MOMENTS = {name: f"{AWARE}--exp-avg-dtype {name} --exp-avg-sq-dtype {name} " for name in FORMATS}


def zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(numel, dtype=dtype)


def test_every_layout_makes_the_same_updates_in_fp8() -> None:
    """The updates include random rounding: the random bits depend only on the element, and no layout splits a block
    that shares a scale. The parity matrix (tests/parity) tests states in 16 bits."""
    flags = f"{MODEL} --fp64 {MOMENTS['fp8']}"
    alone = train_in_world(1, flags.split())
    sharded = [(2, f"{STRATEGY} {strategy}") for strategy in SHARDED]
    for ranks, layout in ((2, "--tp 2 --sequence-parallel"), (4, "--pp 2 --overlap-grad-reduce"), *sharded):
        assert first_difference(alone, train_in_world(ranks, (flags + layout).split()), 1e-9) is None, layout


def test_states_in_the_main_dtype_give_plain_adam() -> None:
    plain = train_in_world(1, f"{MODEL} --fp64".split())
    assert first_difference(plain, train_in_world(1, f"{MODEL} --fp64 {AWARE}".split()), 1e-9) is None


def test_remainders_are_lossless() -> None:
    """Training with bf16 parameters and stored remainders gives the same result as training with fp32 main parameters,
    except for parameters halfway between two bf16 numbers."""
    flags = f"{MODEL} --bf16 {AWARE}"
    whole, parts = (train_in_world(1, f"{flags}{more}".split()) for more in ("--no-store-param-remainders", ""))
    mains = [key for key in whole.tensors if key.startswith("step 1 main_param")]
    assert mains and all(torch.equal(whole.tensors[key], parts.tensors[key]) for key in mains)
    x = torch.randn(10_000) * torch.randn(10_000).exp()
    bits = x.view(torch.int32)
    bits[:100] = bits[:100] & -0x10000 | 0x8000
    params, remainders = split_master(x)
    assert torch.equal(join_master(params, remainders), x)
    halfway = bits & 0xFFFF == 0x8000
    assert torch.equal(params[~halfway], x[~halfway].to(torch.bfloat16))
    assert torch.equal(params[halfway].view(torch.int16).int(), (bits[halfway] >> 16) + 1)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8"])
def test_rounding_is_unbiased_and_idempotent(name: str, squared: bool) -> None:
    torch.manual_seed(1)
    x = torch.randn(640) * torch.randn(640).exp()
    x, key = x.square() if squared else x, x.view(torch.int32)
    state = StoredState(640, name, torch.float32, zeros, squared)
    mean, spread = torch.zeros(640, dtype=torch.float64), torch.zeros(640, dtype=torch.float64)
    for number in range(400):
        codes, exponents = state.rounded(x, uniform_of(key, 7919 * number))
        state.codes.copy_(codes)
        if exponents is not None:
            state.exponents.copy_(exponents)
        error = state.read(*state.tensors(0, 640)).double() - x
        mean, spread = mean + error / 400, spread + error.square() / 400
    relative, deviation = (mean / x.abs()).sum(), (spread / x.square()).sum().div(400).sqrt()
    assert deviation > 1e-4 and relative.abs() <= 4 * deviation
    values, saved = state.read(*state.tensors(0, 640)).clone(), state.exported().clone()
    again = StoredState(640, name, torch.float32, zeros, squared)
    again.exported().copy_(saved)
    again.take_up(saved)
    assert torch.equal(again.read(*again.tensors(0, 640)), values)


def test_small_changes_of_a_moment_are_not_lost() -> None:
    """With rounding to nearest, a moment would never change, because 0.99 times an fp8 number rounds back to the
    number."""
    state = StoredState(1280, "fp8", torch.float32, zeros, squared=True)
    key, values = torch.arange(1280, dtype=torch.int32), torch.ones(1280)
    for number in range(100):
        codes, exponents = state.rounded(values, uniform_of(key, 104729 * number))
        state.codes.copy_(codes)
        state.exponents.copy_(exponents)
        values = 0.99 * state.read(*state.tensors(0, 1280))
    assert values.mean().item() == pytest.approx(0.99**100, rel=0.05)


def test_checkpoints_load_across_formats_and_layouts(tmp_path: Path) -> None:
    """States load bit for bit into every format that can represent the saved values. There is one exception: the
    remainder format rounds parameters that are halfway between two bf16 numbers away from zero."""
    checkpoints, base = Checkpoints(tmp_path), f"{MODEL} --bf16 "
    fp8 = f"{MOMENTS['fp8']} --main-grads-dtype bf16 "
    checkpoints.visit("fp8", 2, parse_args(f"{base}{fp8}--tp 2".split()), train=True)
    checkpoints.visit("fp16", 2, parse_args(f"{base}{MOMENTS['fp16']}--main-params-dtype fp16".split()), train=True)
    for name, ranks, flags in (
        ("fp8", 1, fp8),
        ("fp8", 4, f"{fp8} --pp 2"),
        ("fp8", 1, MOMENTS["bf16"]),
        ("fp8", 2, ""),
        ("fp16", 1, f"{MOMENTS['fp16']} --main-params-dtype fp16"),
        ("fp16", 2, "--tp 2"),
    ):
        wrong = checkpoints.visit("loaded", ranks, parse_args(f"{base}{flags}".split()), [name])
        assert [key for key in wrong[name] if "initial weight" not in key] == [], flags
        assert AWARE not in flags or wrong[name] == [], flags


def test_a_sum_in_bf16_keeps_small_terms() -> None:
    """Each of the 32 micro-batches adds about a tenth of the bf16 rounding step to the sum."""
    weight = torch.nn.Parameter(torch.zeros(100, 100))
    weight.main_grad = torch.ones(100, 100, dtype=torch.bfloat16)
    small = 0.1 * 2**-7 * (1 + 0.1 * torch.rand(100, 100))
    deviation = (32 * 0.1 * 0.9) ** 0.5 * 2**-7 / 100  # standard deviation of the mean over all elements

    def add_(out: Tensor, overwrite: bool) -> None:
        (out.zero_() if overwrite else out).add_(small * (0.9 + 0.2 * torch.rand(100, 100)))

    for rounds, expected in ((False, 1.0), (True, 1 + 32 * small.mean().item())):
        weight.main_grad_rounding = rounding_sum(compiled=False) if rounds else None
        weight.main_grad.fill_(1)
        for _ in range(32):
            accumulate_weight_grad(weight, add_)
        assert weight.main_grad.float().mean().item() == pytest.approx(expected, abs=6 * deviation)


def test_a_compiled_sum_in_bf16_has_the_same_bits() -> None:
    total, added = torch.randn(64, 96).bfloat16(), torch.randn(64, 96) * 1e-2
    sums = [total.clone() for _ in range(2)]
    for compiled, found in enumerate(sums):
        rounding_sum(bool(compiled))(found, added.clone())
    assert torch.equal(*sums)
    assert not torch.equal(sums[0], total)


OF_STATES = [
    *((2, f"--exp-avg-dtype {name} --exp-avg-sq-dtype {name}") for name in FORMATS),
    (2, "--no-store-param-remainders --exp-avg-dtype bf16"),
    (2, "--main-params-dtype fp16 --exp-avg-dtype fp8 --exp-avg-sq-dtype fp16"),
    (4, "--pp 2 --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16"),
]


@pytest.mark.grid("case", OF_STATES[-2:-1], OF_STATES)
def test_sharding_changes_no_bit_of_low_precision_states(case: tuple[int, str]) -> None:
    """The cases store the main parameters as 16-bit remainders, in fp32, or in fp16. The bf16 parameters are gathered
    layer by layer."""
    ranks, formats = case
    flags = f"{MODEL} --bf16 {AWARE} {formats} --micro-batch-size 2 --clip-grad 0"
    plain, *sharded = (
        train_in_world(ranks, f"{flags} {STRATEGY} {strategy}".split(), 1, unseen=1) for strategy in ("optim", *SHARDED)
    )
    for found in sharded:
        assert not found.replica_errors
        # The gradient norm may differ, because it is summed in a different order.
        keys = [key for key in plain.tensors if not key.endswith("grad_norm")]
        assert [key for key in keys if not plain[key].equal(found[key])] == []
