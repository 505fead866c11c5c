"""Compare a mixture-of-experts layer in one process with a straightforward implementation. The parts of the layer are
also tested individually."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.core.config.layers import each, layer_pattern
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe.grouped_gemms import Segments, add_each_product_, gemm_each, gemm_grouped, has_grouped_kernel
from megatron.core.moe.layer import MoELayer
from megatron.core.moe.load_balancing import RunningLoads, end_step
from megatron.core.parallel_state import Axis, ParallelState
from megatron.core.pipeline_parallel.stage_parameters import count_parameters, model_states, stage_metas
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import config_of_sections
from megatron.training.config.validation import resolve
from tests.gpt_cases import FP64
from tests.moe_cases import CASES, DEEPSEEK, MIXTRAL, build_layer, context, written_out
from tests.rules import problems

S, B = 16, 3
CPU = torch.device("cpu")
SCALE = 1.7
"""Scale of the gradients of auxiliary losses. In training, the scale is the initial gradient of the backward pass *
valid tokens / tokens of the batch."""


def random_input(config: TransformerConfig, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(S, B, config.hidden_size, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(layer: MoELayer, x: Tensor, objective: Tensor) -> dict[str, Tensor]:
    wanted = {"input": x} | {name: p for name, p in layer.named_parameters() if p.requires_grad}
    return dict(zip(wanted, torch.autograd.grad(objective, list(wanted.values())), strict=True))


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall"])
@pytest.mark.parametrize("case", CASES)
def test_the_layer_matches_its_plain_implementation(case: str, dispatcher: str) -> None:
    config = replace(CASES[case], moe_token_dispatcher_type=dispatcher)
    layer, x = build_layer(config), random_input(config)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    expected, auxiliary, kept = written_out(config, layer, x)
    expected_gradients = gradients(layer, x, (expected * direction).sum() + SCALE * S * B * auxiliary)
    y = layer(x, context(B, SCALE))
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for name, found in gradients(layer, x, (y * direction).sum()).items():
        torch.testing.assert_close(
            found, expected_gradients[name], rtol=1e-10, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}"
        )
    dropped = S * B * config.moe_router_topk - kept.sum()
    assert layer.router.balance.tally[-1] == dropped
    assert (dropped > 0) == (config.moe_expert_capacity_factor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spare_rows_are_left_out(dtype: torch.dtype) -> None:
    """Spare rows belong to no expert. The values of spare rows must affect neither outputs nor gradients, and all
    outputs must be finite."""
    x, weight = torch.randn(11, 16, dtype=dtype), torch.randn(3, 24, 16, dtype=dtype)
    x[8:] = torch.nan
    segments, exact = Segments.of_counts(torch.tensor([3, 0, 5]), True), Segments.of_sizes((3, 0, 5), x.device)
    for gemm in (gemm_each, gemm_grouped):
        y = gemm(x, weight.transpose(1, 2), segments)
        assert torch.equal(y[:8], gemm(x[:8], weight.transpose(1, 2), exact))
        assert not y[8:].any()
    dw, expected = torch.zeros(2, 3, 24, 16)
    add_each_product_(dw, y, x, segments)
    add_each_product_(expected, y[:8], x[:8], exact)
    assert torch.equal(dw, expected) and dw.isfinite().all()


def test_evaluation_has_a_separate_capacity() -> None:
    whole = MIXTRAL
    limited = replace(whole, moe_expert_capacity_factor=0.7)
    x = random_input(whole)
    for config, trained, evaluated in (
        (replace(whole, moe_eval_capacity_factor=0.7), whole, limited),
        (replace(limited, moe_eval_capacity_factor=100.0), limited, whole),
        (limited, limited, limited),
    ):
        layer = build_layer(config)
        assert torch.equal(layer(x, context(B, SCALE)), build_layer(trained)(x, context(B, SCALE)))
        assert torch.equal(layer.eval()(x, context(B)), build_layer(evaluated)(x, context(B)))


def test_a_step_updates_the_bias_and_logs_the_load() -> None:
    """The bias update counts the assignments that experts accepted, as in Megatron-LM, which drops tokens before
    counting. The logged expert load counts all assignments, including those of dropped tokens."""
    config = replace(DEEPSEEK, moe_expert_capacity_factor=0.7)
    layer, x = build_layer(config), random_input(config)
    balance = layer.router.balance
    before = balance.expert_bias.clone()
    accepted = 2 * written_out(config, layer, x)[2].sum((0, 1))
    for number in range(2):
        layer(x, context(B, SCALE, number)).sum().backward()
    layer.eval()
    layer(x, context(B, SCALE)).sum().backward()  # expert loads are not counted in evaluation mode
    assigned = end_step([balance], Axis())[0, :8]
    assert assigned.sum() == 2 * S * B * config.moe_router_topk
    signs = torch.sign(accepted.mean() - accepted)
    assert (signs != torch.sign(assigned.mean() - assigned)).any()
    expected = before + config.moe_router_bias_update_rate * signs.float()
    torch.testing.assert_close(balance.expert_bias.detach(), expected)
    assert not balance.tally.any()


def router_gradient(layer: MoELayer, batches: list[Tensor]) -> Tensor:
    """Return the gradient of the auxiliary loss with respect to the router weight. All forward passes precede all
    backward passes, as in GPipe."""
    layer.router.balance.begin_step()
    layer.zero_grad()
    outputs = [layer(x, context(x.shape[1], SCALE, number)) for number, x in enumerate(batches)]
    for y in outputs:
        (y * 0.0).sum().backward()
    end_step([layer.router.balance], Axis())
    assert layer.router.weight.grad is not None
    return layer.router.weight.grad.clone()


AUXILIARY = replace(MIXTRAL, moe_aux_loss_coeff=(1.0,), moe_z_loss_coeff=0.0)


@pytest.mark.parametrize("kind", ["aux_loss", "global_aux_loss"])
def test_the_loss_acts_within_its_step(kind: str) -> None:
    layer = build_layer(replace(AUXILIARY, moe_router_load_balancing_type=(kind,)))
    batches = [random_input(AUXILIARY, seed).detach() for seed in range(2)]
    first, *others = (router_gradient(layer, batches) for _ in range(4))
    assert first.abs().max() > 1e-3
    assert all(torch.equal(first, other) for other in others)


def test_the_loss_uses_running_means_for_any_micro_batch_size() -> None:
    """The expert loads for sample n are computed from samples 0 to n. With one sample per micro-batch, these expert
    loads equal the running mean that Megatron-LM uses."""
    layer = build_layer(AUXILIARY)
    x = torch.cat([random_input(AUXILIARY, seed).detach() for seed in range(2)], dim=1)  # six samples
    logits = x @ layer.router.weight.T
    probabilities, share, loss = logits.softmax(-1), torch.zeros(8, dtype=torch.float64), torch.zeros(())
    for n in range(6):
        counts = torch.bincount(logits[:, n].topk(2).indices.flatten(), minlength=8)
        share = share + (counts / (2 * S) - share) / (n + 1)
        loss = loss + 8 * (share * probabilities[:, n].sum(0)).sum()
    (expected,) = torch.autograd.grad(SCALE * loss, layer.router.weight)
    for size in (1, 2, 3, 6):
        found = router_gradient(layer, list(x.split(size, dim=1)))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_schedule_that_runs_micro_batches_in_another_order_is_an_error() -> None:
    loads = RunningLoads(ParallelState())
    loads.start(1, torch.ones(2, 4))
    with pytest.raises(ValueError, match="backward pass of micro-batch 1 before the forward pass of micro-batch 0"):
        loads.shares(1)
    loads.start(0, torch.tensor([[4.0, 0, 0, 0], [0, 4, 0, 0]]))
    assert loads.shares(0).tolist() == [[1, 0, 0, 0], [0.5, 0.5, 0, 0]]
    assert loads.shares(1)[1].tolist() == [6 / 16, 6 / 16, 2 / 16, 2 / 16]


def test_logged_loss_has_the_loads_of_its_own_batch() -> None:
    config = replace(MIXTRAL, moe_layer_freq="1")
    layer, x = build_layer(config), random_input(config)
    layer(x, context(B, SCALE)).sum().backward()
    (row,) = end_step([layer.router.balance], Axis())
    logits = (x @ layer.router.weight.T).detach()
    mean = logits.softmax(-1).mean((0, 1))
    share = torch.zeros(8, dtype=torch.float64).index_add_(
        0, logits.topk(2).indices.flatten(), torch.ones(S * B * 2, dtype=torch.float64)
    ) / (S * B * 2)
    torch.testing.assert_close(row[-3], S * B * 8 * (share * mean).sum())
    torch.testing.assert_close(row[-2], logits.logsumexp(-1).square().sum())


def test_ties_go_to_the_lower_number() -> None:
    layer = build_layer(MIXTRAL)
    with torch.no_grad():
        layer.router.weight.zero_()
    choice = layer.router(random_input(MIXTRAL), context(B))
    assert (choice.experts == torch.tensor([0, 1])).all()
    assert (choice.weights == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_matches_its_twin(dtype: torch.dtype) -> None:
    segments = Segments.of_sizes((3, 0, 7, 1), torch.device("cpu"))
    x, weight = torch.randn(11, 16, dtype=dtype), torch.randn(4, 24, 16, dtype=dtype)
    assert has_grouped_kernel(dtype, CPU, 16, 24)
    for matrices, rows in ((weight.transpose(1, 2), x), (weight, torch.randn(11, 24, dtype=dtype))):
        torch.testing.assert_close(gemm_grouped(rows, matrices, segments), gemm_each(rows, matrices, segments))
    nothing = Segments.of_sizes((0, 0, 0, 0), torch.device("cpu"))
    assert gemm_grouped(x[:0], weight.transpose(1, 2), nothing).shape == (0, 24)


def test_layers_in_16_bits_route_in_fp32() -> None:
    layer = build_layer(MIXTRAL, dtype=torch.bfloat16)
    x = random_input(MIXTRAL).detach()
    choice = layer.router(x.bfloat16(), context(B))
    assert choice.weights.dtype == torch.float32
    logits = x.bfloat16().float() @ layer.router.weight.float().T
    assert torch.equal(choice.experts, logits.topk(2).indices)


# Tests of whole models, including parameter counts


def moe_model(**changes: Any) -> TransformerConfig:
    return replace(DEEPSEEK, num_layers=4, moe_layer_freq="([0]+[1]*3)", **changes)


@pytest.mark.parametrize("biased", [False, True])
def test_planned_parameters_are_the_trained_ones(biased: bool) -> None:
    config = moe_model(moe_shared_expert_gate=True, add_bias_linear=biased)
    model = GPTModel(config, FP64)
    trained = [p.meta for p in model.parameters() if p.requires_grad]
    assert trained == stage_metas(config)
    states = [p.meta.name for p in model.parameters() if not p.requires_grad]
    layers = [1, 2, 3]
    assert states == [f"decoder.layers.{i}.mlp.router.expert_bias" for i in layers]
    assert count_parameters(config).total == sum(meta.numel for meta in trained)


class Doubled(TorchFunctionMode):
    """Torch function mode that replaces fp32 by fp64 in all computations."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **named)


def test_cached_states_do_not_depend_on_the_first_callers_mode() -> None:
    """The metadata of model states is read from a model that is built on the meta device. The result is cached for all
    callers."""
    with Doubled(), Doubled():
        found = model_states(moe_model(seq_length=48))
        assert torch.zeros(2, dtype=torch.float32).dtype == torch.float64, "the modes are active again"
    assert {dtype for _, dtype in found} == {"float32"}


def test_states_are_not_rounded_to_the_precision_of_the_run() -> None:
    model = GPTModel(moe_model(), ModelParallelConfig(bf16=True))
    kinds = {p.meta.name.rsplit(".", 1)[1]: p.dtype for p in model.parameters() if not p.requires_grad}
    assert kinds == {"expert_bias": torch.float32}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", [1, 1, 1, 1]),
        ("2", [1, 0, 1, 0]),
        ("([0]*1+[1]*3)*1", [0, 1, 1, 1]),
        ("[0, 1] * 2", [0, 1, 0, 1]),
        ("2*[1,0]", [1, 0, 1, 0]),
        ("(0,1,1,0)", [0, 1, 1, 0]),
    ],
)
def test_layer_patterns_choose_expert_layers(text: str, expected: list[int]) -> None:
    assert list(layer_pattern(text, 4, each)) == [bool(item) for item in expected]


BROKEN = ["", "0", "-1", "[1]*3", "[1,2,0,0]", "x", "1.5", "[[1]]*4", "__import__('os')", "[1]**4"]


@pytest.mark.parametrize("text", BROKEN)
def test_invalid_layer_patterns_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        layer_pattern(text, 4, each)


EXPERTS = "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --lr 1 --mock-data --train-iters 1 "
EXPERTS += "--num-experts 8 --disable-bias-linear"
GROUPED = "--moe-grouped-gemm"


@pytest.mark.parametrize("width", [24, 25, 32, 34])
@pytest.mark.parametrize("precision", ["--bf16", "--fp32", "--fp64"])
def test_the_notice_matches_the_expert_kernel_on_cpu(width: int, precision: str) -> None:
    flags = f"--cpu {GROUPED} {precision} --moe-ffn-hidden-size {width}"
    config = resolve(parse_args(f"{EXPERTS} {flags}".split()), 1)
    dtype = getattr(torch, config.parallel.params_dtype)
    said = any(line.startswith(GROUPED) for line in problems(flags, base=EXPERTS))
    assert said != has_grouped_kernel(dtype, torch.device("cpu"), config.model.hidden_size, width)


def test_the_single_loss_of_an_older_file_is_read() -> None:
    saved = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1}
    model = config_of_sections({"model": saved}).model
    assert model.moe_balancing_coeff("seq_aux_loss") == 0.1 and not model.moe_balancing_coeff(
        "aux_loss", "global_aux_loss"
    )
