"""Compare fp8 linear layers that are sharded over tensor-parallel ranks with one process. Apart from the fp8 casts, all
values are fp32 instead of bf16. The GEMMs of experts are compared with one GEMM of dequantized operands per expert.

Every rank casts its shard of a tensor with the same scales as one process casts the whole tensor. The results therefore
differ only by the order of sums.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

from megatron.core import collectives as mappings
from megatron.core.init import initialize_parameters_
from megatron.core.moe.grouped_gemms import Segments, add_each_product_
from megatron.core.parallel_state import Axis, ParallelState, initialize_model_parallel
from megatron.core.param_meta import Init
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedParallelLinear,
    RowParallelLinear,
    TPContext,
)
from megatron.core.tensor_parallel.linear_gemms import Cuts, WeightCasts
from megatron.core.tensor_parallel.linear_spec import ColumnLinear, ReplicatedLinear, RowLinear
from megatron.extensions.speed.fp8 import grouped
from megatron.extensions.speed.fp8.build import Fp8Format
from megatron.extensions.speed.fp8.casts import E4M3
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8.grouped import Fp8GroupedGemms, has_grouped_fp8_kernel
from megatron.extensions.speed.fp8.recipes import DelayedScaling
from tests.extensions.fp8.test_gemms import by_rows, fp64, in_blocks
from tests.harness import run_world, tp_context

B, H = 2, 16
SIZES = {"blockwise": (128, 256)}
"""Sequence length and number of inner features, keyed by recipe. These recipes need larger sizes than the default, so
that no tile spans two ranks."""
NORMAL = Init("normal", 0.3)


class Layers(nn.Module):
    """A replicated layer, followed by a gated column-parallel layer and a row-parallel layer."""

    def __init__(self, ctx: TPContext, inner: int) -> None:
        super().__init__()
        self.down = ReplicatedParallelLinear(ReplicatedLinear("down", H, H, False, init=NORMAL), ctx)
        self.fc1 = ColumnParallelLinear(ColumnLinear("fc1", H, (2, inner), True, shard_dim=1, init=NORMAL), ctx)
        self.fc2 = RowParallelLinear(RowLinear("fc2", inner, H, True, init=NORMAL), ctx)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(self.down(x)).unflatten(-1, (2, -1)).unbind(-2)
        return self.fc2(gate.tanh() * up)


def whole(x: Tensor, sp: bool, state: ParallelState) -> Tensor:
    return mappings.all_gather(x, state.tp) if sp else x


def steps(rank: int, size: int, sp: bool, recipe: str) -> dict[str, Tensor]:
    """Run two steps with two micro-batches each, and return the results gathered from all ranks: outputs, gradients of
    inputs and weights, and amax histories."""
    state = initialize_model_parallel(size)
    config = Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe)
    fp8 = Fp8Format(config, range(1), WeightCasts())
    ctx = tp_context(state, sp, torch.float32, format=fp8)
    length, inner = SIZES.get(recipe, (16, 32))
    net, found = Layers(ctx, inner), {}
    weights = [parameter for parameter in net.parameters() if parameter.requires_grad]
    initialize_parameters_(weights, 7, state.coords)
    scaling = DelayedScaling(config, [net], state.axis("stage"))
    for step in range(2):
        for param in weights:
            param.main_grad, param.grad = torch.zeros_like(param), None
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            x, dy = (torch.randn(length, B, H, generator=generator) * (micro + 1) for _ in range(2))
            x, dy = (mappings.local_slice(part, state.tp) if sp else part for part in (x, dy))
            x = x.clone().requires_grad_()
            with fp8.casts.kept():
                y = net(x)
                y.backward(dy)
            key = f"step {step} {micro}"
            found |= {f"{key} y": whole(y.detach(), sp, state), f"{key} dx": whole(x.grad, sp, state)}
        for param in weights:
            if param.meta.matrix and not param.meta.sharded:
                partial = bool(param.meta.partial_over)
                assert partial == sp
                summed = mappings.all_reduce_(param.main_grad.clone(), state.tp) if partial else param.main_grad
                found[f"step {step} {param.meta.name}"] = summed
            elif param.meta.matrix:
                dim = param.meta.sharded["tp"]
                found[f"step {step} {param.meta.name}"] = mappings.all_gather(param.main_grad, state.tp, dim)
        scaling.end_step(torch.tensor(0.0))
    found |= {p.meta.name: p.detach().clone() for p in net.parameters() if not p.requires_grad}
    return found


@lru_cache
def one_process(recipe: str) -> dict[str, Tensor]:
    return run_world(1, steps, False, recipe)[0]


@pytest.mark.parametrize(
    ("recipe", "sp"),
    [("tensorwise", True), ("delayed", True), ("delayed", False), ("rowwise", True), ("blockwise", True)],
)
def test_ranks_cast_parts_as_one_process_casts_the_whole(recipe: str, sp: bool) -> None:
    expected = one_process(recipe)
    for found in run_world(2, steps, sp, recipe):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = (found[name] - value).norm() / value.norm()
            assert error < 1e-5, f"{name}: {error}"
            if recipe == "delayed" and "history" in name and "fc1" in name:
                assert torch.equal(found[name][:2], value[:2]), "histories of inputs and weights"


def experts(rank: int, size: int, recipe: str) -> dict[str, Tensor]:
    """Run two expert layers, of which one is gated. The widths of both layers are sharded over the ranks. Return the
    results gathered from all ranks."""
    expt_tp = initialize_model_parallel(size).tp
    fp8 = Fp8Format(Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe), range(1), WeightCasts())
    generator, inner = torch.Generator().manual_seed(3), 256
    shapes = (20, H), (20, H), (3, 2, inner, H), (3, H, inner)
    x, dy, fc1, fc2 = (torch.randn(shape, generator=generator) for shape in shapes)
    fc1, fc2 = (mappings.local_slice(weight, expt_tp, 2).contiguous() for weight in (fc1, fc2))
    cut, segments = size > 1, Segments.of_sizes([9, 0, 11], torch.device("cpu"))
    both = Cuts(outputs=cut), Cuts(inputs=cut)
    one, two = (Fp8GroupedGemms(fp8, expt_tp, cuts, False, False, add_each_product_) for cuts in both)
    hidden = one.forward(x, fc1, segments)
    gate, up = hidden.unflatten(-1, (2, -1)).unbind(-2)
    d_up = two.input_grad(dy, fc2, segments)
    active, d_gated = gate.tanh() * up, torch.cat((d_up * up, d_up * gate), -1)
    parts = {"y": two.forward(active, fc2, segments), "dx": one.input_grad(d_gated, fc1, segments)}
    d_fc1, d_fc2 = torch.zeros_like(fc1), torch.zeros_like(fc2)
    one.add_weight_grad_(d_fc1.flatten(1, 2), d_gated, x, segments)
    two.add_weight_grad_(d_fc2, dy, active, segments)
    return {
        **{name: mappings.all_reduce_(part, expt_tp) for name, part in parts.items()},
        "gate": mappings.all_gather(gate, expt_tp, 1),
        "d_up": mappings.all_gather(d_up, expt_tp, 1),
        "d_fc1": mappings.all_gather(d_fc1, expt_tp, 2),
        "d_fc2": mappings.all_gather(d_fc2, expt_tp, 2),
    }


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_experts_cast_parts_as_one_process_casts_the_whole(recipe: str) -> None:
    expected = run_world(1, experts, recipe)[0]
    for found in run_world(2, experts, recipe):
        for name, value in expected.items():
            error = (found[name] - value).norm() / value.norm()
            assert error < 1e-5, f"{name}: {error}"


ROWS = (37, 0, 16, 11)
SPARE = 5
IN, OUT = 144, 160


def in_fp8(x: Tensor, blockwise: bool, rows: int = 1) -> Tensor:
    """Cast x [n, k] to fp8, and return the dequantized values in fp64. The cast has one scale per row, or, with
    `blockwise`, one power-of-two scale per block of `rows` x 128 elements."""
    return in_blocks(x, rows, E4M3) if blockwise and len(x) else fp64(by_rows(x, E4M3))


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_each_row_is_multiplied_by_the_matrix_of_its_expert(recipe: str) -> None:
    torch.manual_seed(2)
    x, dy = (torch.randn(sum(ROWS) + SPARE, width).bfloat16() for width in (IN, OUT))
    weight = torch.randn(len(ROWS), 2, OUT // 2, IN).bfloat16()
    casts, blocks = WeightCasts(), recipe == "blockwise"
    context = Fp8Format(Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe), range(1), casts)
    gemms = Fp8GroupedGemms(context, Axis(), Cuts(), False, False, add_each_product_)
    segments = Segments.of_counts(torch.tensor(ROWS), spare=True)
    with casts.kept():
        for _ in range(2):
            y, dx = gemms.forward(x, weight, segments), gemms.input_grad(dy, weight, segments)
        kept = casts.nbytes
    scales = 2 * 2 * 2 if blocks else OUT + IN
    assert kept == len(ROWS) * (2 * OUT * IN + 4 * scales), "each weight is stored twice, by rows and by columns"
    assert y.dtype == dx.dtype == torch.bfloat16
    assert not y[sum(ROWS) :].any() and not dx[sum(ROWS) :].any(), "spare rows"
    matrices = weight.flatten(1, 2)
    for expert, (rows, d_rows) in enumerate(zip(segments.split(x), segments.split(dy), strict=True)):
        for found, a, b in (
            (segments.split(y)[expert], rows, matrices[expert]),
            (segments.split(dx)[expert], d_rows, matrices[expert].t()),
        ):
            a8, b8 = in_fp8(a, blocks), in_fp8(b, blocks, 128 if blocks else 1)
            room = 2.0**-20 * (a8.abs() @ b8.abs().t())
            error = (found.double() - a8 @ b8.t()).abs()
            assert (error <= room + 2.0**-8 * (a8 @ b8.t()).abs()).all(), expert
    assert gemms.forward(x[:0], weight, Segments.of_sizes([0] * 4, torch.device("cpu"))).shape == (0, OUT)


def test_only_some_gpus_have_a_grouped_fp8_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grouped fp8 kernel is either torch's kernel, which supports only some GPUs and recipes, or a replacement for
    it."""
    gpu = torch.device("cuda", 0)
    for capability, found in (((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with monkeypatch.context() as without:
            without.setattr(grouped, "LEFT_OUT", {"grouped_scaled_mm"})
            assert has_grouped_fp8_kernel("delayed", gpu) == found
            assert not has_grouped_fp8_kernel("blockwise", gpu)
        assert has_grouped_fp8_kernel("delayed", gpu) and has_grouped_fp8_kernel("blockwise", gpu)
