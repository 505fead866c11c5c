"""Tests of the choice of kernels. At the start of a run, kernels are compared with torch. If a kernel is wrong, fails
or is slow, torch is used instead. The run reports such kernels in a single line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

from megatron.core import compiled_regions, kernels
from megatron.core.kernels import KERNELS, LEFT_OUT, kernel_for, operation
from megatron.core.parallel_state import Axis, ParallelState, initialize_model_parallel
from megatron.core.transformer.layer import TransformerLayer
from megatron.extensions.speed.fusions.hooks import KernelChoice
from megatron.extensions.speed.fusions.kernel_choice import FusedKernel, RunShapes, choose_kernels
from megatron.extensions.speed.fusions.kernels.casts import TOLERANCE
from megatron.extensions.speed.fusions.layer import FusedTransformerLayer
from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import resolve
from megatron.training.initialize import Runtime
from megatron.training.reliability.launch import Launch
from tests.harness import run_world, train_in_world
from tests.tiny import TINY
from tests.triton_cases import apart, round_to_fp8_as_torch, run_on_cpu

CPU = torch.device("cpu")
MODEL = f"{TINY} --hidden-size 32 --seq-length 16 --vocab-size 64 --micro-batch-size 2 --global-batch-size 2"


@operation
def doubled_(x: Tensor, total: Tensor) -> Tensor:
    """Return 2 x. Also add the sum over all elements of 2 x to `total` in place."""
    y = 2 * x
    total.add_(y.sum())
    return y


def right(x: Tensor, total: Tensor) -> Tensor:
    total.add_(2 * x.sum())
    return x + x


def wrong(x: Tensor, total: Tensor) -> Tensor:
    return right(x, total).zero_()


def wrong_sum(x: Tensor, total: Tensor) -> Tensor:
    return x + x


def not_a_number(x: Tensor, total: Tensor) -> Tensor:
    return right(x, total) * torch.nan


def raises(x: Tensor, total: Tensor) -> Tensor:
    raise ValueError("no kernel\nfor this GPU")


def missing(x: Tensor, total: Tensor) -> Tensor:
    import no_such_package  # noqa: F401

    return x


def kernel(run: Callable[..., Tensor]) -> FusedKernel:
    def samples(shapes: RunShapes) -> Iterator[tuple[Tensor, Tensor]]:
        yield shapes.random(shapes.tokens, shapes.hidden), torch.zeros(())

    return FusedKernel(run, doubled_, lambda x, total: True, samples, 1e-5)


def clock_of(slow: float) -> Callable[[Callable[[], object]], float]:
    """Return a clock that reports `slow` seconds for a kernel and one second for torch. The calls of the clock must
    alternate between a kernel and torch, beginning with a kernel."""
    seconds = iter([slow, 1.0] * 9)

    def clock(run: Callable[[], object]) -> float:
        run()
        return next(seconds)

    return clock


@pytest.fixture(autouse=True)
def own_table(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    LEFT_OUT.clear()


def shapes() -> RunShapes:
    config = resolve(parse_args(MODEL.split()), 1)
    found = RunShapes.of(config, CPU)
    assert (found.tokens, found.hidden, found.heads, found.vocab, found.fp8) == (32, 32, 4, 64, None)
    return found


def chosen(run: Callable[..., Tensor], slow: float = 0.5, world: Axis | None = None) -> list[str]:
    said: list[str] = []
    choose_kernels(shapes(), world or Axis(), clock_of(slow), said.append, {"doubled_": kernel(run)})
    assert ({"doubled_"} if said else set()) == LEFT_OUT
    return said


LINES = [
    (right, 0.5, None),
    (right, 1.05, None),
    (wrong, 0.5, "differs by 1.0e+00, more than 1.0e-05"),
    (wrong_sum, 0.5, "differs by 1.0e+00, more than 1.0e-05"),
    (not_a_number, 0.5, "differs by 1.0e+09, more than 1.0e-05"),
    (raises, 0.5, "raises ValueError: no kernel for this GPU"),
    (missing, 0.5, "raises ModuleNotFoundError: No module named 'no_such_package'"),
    (right, 1.31, "takes 1.31 times as long as torch"),
]


@pytest.mark.parametrize(("run", "slow", "line"), LINES)
def test_a_wrong_or_slow_kernel_is_not_used_and_reported_in_one_line(
    run: Callable[..., Tensor], slow: float, line: str | None
) -> None:
    assert chosen(run, slow) == ([] if line is None else [f" kernel doubled_ left out: {line}"])


@pytest.mark.parametrize(("factor", "kept"), [(1.0, True), (1.06, False)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_may_skip_the_rounding_to_16_bits(dtype: torch.dtype, factor: float, kept: bool) -> None:
    """In this test, the compiled cast converts fp32 values directly to fp8, whereas the uncompiled cast rounds the
    values to bf16 first."""
    x, said = torch.randn(4000, generator=torch.Generator().manual_seed(1)), list[str]()
    own, compiled = (lambda x: (factor * x.bfloat16()).to(dtype)), (lambda x: x.to(dtype))
    cast = FusedKernel(own, compiled, lambda x: True, lambda shapes: [(x,)], TOLERANCE)
    choose_kernels(shapes(), Axis(), None, said.append, {"cast": cast})
    assert (not said) == kept, said


def test_nothing_is_timed_in_deterministic_runs() -> None:
    said: list[str] = []
    choose_kernels(shapes(), Axis(), None, said.append, {"doubled_": kernel(right)})
    choose_kernels(shapes(), Axis(), None, said.append, {"doubled_": kernel(wrong)})
    assert len(said) == 1 and "differs" in said[0]


def test_torch_computes_unsupported_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KERNELS._entries, "doubled_", KERNELS._entries["norm_cast"])
    monkeypatch.setattr(kernels, "_kernel", lambda name: kernel(wrong))
    x = torch.ones(2, 3)
    assert doubled_(x, torch.zeros(())).sum() == 0 and kernel_for("doubled_", x, x) is not None
    LEFT_OUT.add("doubled_")
    assert doubled_(x, torch.zeros(())).sum() == 12 and kernel_for("doubled_", x, x) is None


def _on_rank(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    world = initialize_model_parallel().world
    return chosen(raises if rank else right, world=world), chosen(right, 1.31 if rank else 0.5, world)


def test_all_ranks_reject_a_kernel_that_fails_on_one() -> None:
    (first, slow), (second, also_slow) = run_world(2, _on_rank)
    assert first == [" kernel doubled_ left out: raises an error on another rank"]
    assert second == [" kernel doubled_ left out: raises ValueError: no kernel for this GPU"]
    assert slow == also_slow == [" kernel doubled_ left out: takes 1.31 times as long as torch"]


def test_every_registered_kernel_has_operands_for_its_comparison() -> None:
    """On a CPU, each kernel runs as plain torch operations, which compute the same result as the GPU kernel."""
    flags = "--num-experts 4 --moe-ffn-hidden-size 32 --swiglu --disable-bias-linear"
    fp8 = f"{flags} --bf16 --fp8-format hybrid --fp8-recipe delayed"
    found = RunShapes.of(resolve(parse_args(f"{MODEL} {fp8}".split()), 1), CPU)
    by_layer = {"residual_gemm", "add_fp8_product_", "mlp"}
    by_layer |= {"attend_to_selected", "selected_attention_gradients", "attended_weights"}
    by_layer |= {"scores_of_keys", "largest_scores", "divergence", "keys_of_chunks"}
    for name in KERNELS:
        operands = list(KERNELS[name].samples(found))  # type: ignore[attr-defined]
        assert bool(operands) != (name in by_layer), name
        for each in operands:
            KERNELS[name].plain(*each)  # type: ignore[attr-defined]


@apart(interpret=True)
def test_interpreted_kernels_pass_the_startup_comparison() -> None:
    """The test covers only cast and norm kernels, because Triton's interpreter cannot multiply bf16 matrices."""
    from megatron.extensions.speed.fusions.kernels import casts, norms

    round_to_fp8_as_torch()
    compiled_regions._compiled = lambda function, static: function
    for module in (casts, norms):
        module.runs_triton = lambda x: True  # type: ignore[attr-defined]
        run_on_cpu(*(each for each in vars(module).values() if isinstance(each, CustomOpDef)))
    sizes = {"tokens": 96, "length": 48, "hidden": 64, "ffn": 48, "heads": 4, "groups": 2, "head_dim": 64}
    found = RunShapes(**sizes, vocab=0, experts=0, dtype=torch.bfloat16, device=CPU, fp8="delayed")
    said: list[str] = []
    choose_kernels(found, Axis(), None, said.append)
    compared = [name for name in KERNELS if list(KERNELS[name].samples(found))]  # type: ignore[attr-defined]
    assert len(compared) == 9 and not said, said


def test_no_fusions_disables_all_fusions() -> None:
    config = resolve(parse_args(f"{MODEL} --compile --attention-backend cudnn --no-fusions".split()), 1)
    runtime = Runtime(Launch(), CPU, ParallelState())
    assert KernelChoice(config).choose(config, config.parallel, runtime).attention_backend == "auto"
    assert set(KERNELS) == LEFT_OUT
    KernelChoice(config).on_model(config, {}, runtime)


def test_a_run_without_fusions_computes_the_same_results() -> None:
    flags = f"{MODEL} --fp64 --no-compile"
    with_fusions, without = (train_in_world(1, f"{flags} {more}".split(), 1) for more in ("", "--no-fusions"))
    assert all(torch.equal(with_fusions.tensors[key], without.tensors[key]) for key in with_fusions.tensors)
    assert issubclass(FusedTransformerLayer, TransformerLayer)
