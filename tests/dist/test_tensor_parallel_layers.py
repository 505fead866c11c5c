"""Tensor-parallel layers against the same layers on one process, in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core import collectives as mappings
from megatron.core.init import initialize_parameters_
from megatron.core.parallel_state import ParallelState, initialize_model_parallel
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.embedding import VocabParallelEmbedding
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    OutputLayer,
    RowParallelLinear,
    TPContext,
)
from megatron.core.tensor_parallel.parameters import ColumnLinear, RowLinear
from megatron.core.tensor_parallel.weight_grad import WeightGradQueue, accumulate_weight_grad, add_product_, add_rows_
from tests.harness import run_world, tp_context

S, B, H, F, V, VOCAB = 8, 2, 12, 16, 40, 37
CUTS = [(1, False), (2, True), (4, False)]
NORMAL = Init("normal", 0.3)


class Net(nn.Module):
    """Every layer once, with a gated and a four-dimensional column weight, and a head tied or not."""

    def __init__(self, ctx: TPContext, tied: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.tp, self.sharded_sequence = ctx.tp, ctx.sequence_parallel
        self.embedding = VocabParallelEmbedding(ParamMeta("embedding.weight", (V, H), {"tp": 0}, NORMAL), ctx)
        self.qkv = ColumnParallelLinear(ColumnLinear("qkv", H, (4, 3, 2), bias, NORMAL), ctx)
        self.proj = RowParallelLinear(RowLinear("proj", 4 * 3 * 2, H, bias, NORMAL), ctx)
        self.fc1 = ColumnParallelLinear(ColumnLinear("fc1", H, (2, F), bias, NORMAL, shard_dim=1), ctx)
        self.fc2 = RowParallelLinear(RowLinear("fc2", F, H, bias, NORMAL), ctx)
        tied_weight = self.embedding.weight if tied else None
        self.head = OutputLayer(ParamMeta("head.weight", (V, H), {"tp": 0}, NORMAL), ctx=ctx, tied_weight=tied_weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> logits [s, b, V/tp]"""
        return self.head(self.body(self.embedding(tokens)))

    def body(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.qkv(x).sin())
        gate, up = self.fc1(x).unflatten(-1, (2, -1)).unbind(-2)
        return x + self.fc2(gate.tanh() * up)


def build(state: ParallelState, sp: bool, dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    ctx = tp_context(state, sp, dtype)
    net = Net(ctx, **options)
    initialize_parameters_(net.parameters(), 11, state.coords)
    for param in net.parameters():
        if param.meta.name.endswith("bias"):  # zeros would test little
            whole = torch.linspace(-1, 1, param.meta.numel, dtype=dtype).view(param.meta.global_shape)
            for dim in param.meta.sharded.values():
                whole = mappings.local_slice(whole, state.tp, dim)
            param.data.copy_(whole)
    return net


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, VOCAB, (B, S), generator=generator) for _ in range(2))


def loss_of(net: Net, tokens: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(net(tokens), labels.t(), net.tp, VOCAB).sum()


def whole_gradients(net: Net, field: str = "grad") -> dict[str, Tensor]:
    """Name -> gradient of the whole parameter, with what `partial_over` asks for done."""
    result = {}
    for param in net.parameters():
        grad = getattr(param, field).clone()
        if param.meta.partial_over:
            mappings.all_reduce_(grad, net.tp)
        for dim in param.meta.sharded.values():
            grad = mappings.all_gather(grad, net.tp, dim)
        assert tuple(grad.shape) == param.meta.global_shape
        result[param.meta.name] = grad
    return result


def one_step(rank: int, size: int, sp: bool, tied: bool, mode: str) -> tuple[float, dict[str, Tensor]]:
    """Loss and whole gradients, by one of the ways that a weight gradient can take."""
    net = build(initialize_model_parallel(size), sp, tied=tied)
    ready: dict[str, int] = {}
    if mode != "autograd":
        for param in net.parameters():
            if param.meta.matrix:
                name = param.meta.name
                param.main_grad = torch.zeros_like(param)
                param.on_main_grad = lambda name=name: ready.update({name: ready.get(name, 0) + 1})
    if mode == "checkpointed":
        net.body = partial(checkpoint, net.body, use_reentrant=False)
    queue = net.head.queue
    if mode == "deferred":
        queue.begin("step")
    loss = loss_of(net, *batch())
    loss.backward()
    if mode == "deferred":
        queue.end()
        assert set(ready) == {"embedding.weight"} and not net.fc1.weight.main_grad.any()
        with pytest.raises(AssertionError, match="left undone"):
            queue.assert_empty()
        queue.run("step")
    queue.assert_empty()
    if mode != "autograd":
        matrices = [param for param in net.parameters() if param.meta.matrix]
        assert ready == {p.meta.name: 1 + (p is net.head.weight and tied) for p in matrices}
        for param in net.parameters():
            if param.meta.matrix:
                assert param.grad is None
                param.grad = param.main_grad
    return loss.item(), whole_gradients(net)


@pytest.fixture(scope="module")
def reference() -> dict[bool, tuple[float, dict[str, Tensor]]]:
    """The same mathematics in plain torch, from the same weights, for a tied and an untied head."""
    return {tied: plain_torch(tied) for tied in (False, True)}


def plain_torch(tied: bool) -> tuple[float, dict[str, Tensor]]:
    net = build(ParallelState(), False, tied=tied)
    names = {param.meta.name: param.detach().clone().requires_grad_() for param in net.parameters()}

    def linear(name: str, x: Tensor) -> Tensor:
        weight, bias = names[f"{name}.weight"], names[f"{name}.bias"]
        return x @ weight.flatten(0, -2).t() + bias.flatten()

    tokens, labels = batch()
    x = names["embedding.weight"][tokens.t()]
    x = x + linear("proj", linear("qkv", x).sin())
    gate, up = linear("fc1", x).chunk(2, -1)
    x = x + linear("fc2", gate.tanh() * up)
    logits = x @ names["embedding.weight" if tied else "head.weight"].t()
    loss = nn.functional.cross_entropy(logits[..., :VOCAB].flatten(0, 1), labels.t().flatten(), reduction="sum")
    loss.backward()
    return loss.item(), {name: param.grad for name, param in names.items()}


@pytest.mark.parametrize(
    ("mode", "size", "sp"),
    [(mode, *cut) for mode in ("autograd", "main_grad", "deferred") for cut in CUTS] + [("checkpointed", 2, True)],
)
def test_loss_and_gradients(mode: str, size: int, sp: bool, reference: dict) -> None:
    tied = mode != "autograd"
    loss, gradients = reference[tied]
    for rank_loss, rank_gradients in run_world(size, one_step, sp, tied, mode):
        assert rank_loss == pytest.approx(loss, rel=1e-13)
        assert rank_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                rank_gradients[name], gradient, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )


# What the modules take and do not take


def without_input_gradient(rank: int, size: int, sp: bool) -> None:
    net = build(initialize_model_parallel(size), sp)
    x = torch.randn(S // size if sp else S, B, H, dtype=torch.float64)
    net.qkv(x).sum().backward()
    assert net.qkv.weight.grad is not None
    net.fc1.weight.requires_grad_(False)
    y = net.fc1(x.requires_grad_()).sum()
    y.backward()
    assert net.fc1.weight.grad is None and x.grad is not None and net.fc1.bias.grad is not None


@pytest.mark.parametrize("sp", [False, True])
def test_inputs_and_weights_that_need_no_gradient(sp: bool) -> None:
    run_world(2, without_input_gradient, sp)


def test_main_grad_sums_in_its_own_precision() -> None:
    """768 ones, then a quarter in 256 parts: a bf16 sum would have stopped growing at 256."""
    out = torch.zeros(1, 1)
    one = torch.ones(256, 1, dtype=torch.bfloat16)
    for _ in range(3):
        add_product_(out, one, one)
    add_product_(out, one, one / 2**10)
    assert out.item() == 768.25
    rows = torch.zeros(3, 1)
    add_rows_(rows, torch.tensor([2] * 256 + [0]), torch.cat([one, one[:1] / 2]))
    assert rows.flatten().tolist() == [0.5, 0.0, 256.0]


def unknown_token(rank: int, size: int) -> str:
    net = build(initialize_model_parallel(size), False)
    with pytest.raises(ValueError, match="token ids must be in") as error:
        net.embedding(torch.tensor([[0, V]]))
    return str(error.value)


def test_token_outside_the_vocabulary() -> None:
    """No rank would own it, and its embedding would silently be zero."""
    for message in run_world(2, unknown_token):
        assert message.startswith("token ids must be in [0, 40)")
        assert message.endswith("found ids from 0 to 40")


def add_four_(out: Tensor, overwrite: bool) -> None:
    (out.zero_() if overwrite else out).add_(4)


def test_deferred_work_runs_per_key_and_is_not_forgotten() -> None:
    queue = WeightGradQueue()
    weight = nn.Parameter(torch.zeros(2, 3))
    weight.main_grad = torch.zeros(2, 3)
    for key in ((0, 0), (0, 1)):
        queue.begin(key)
        assert accumulate_weight_grad(weight, add_four_, queue) is None
        queue.end()
    assert not queue.defers(weight) and not weight.main_grad.any()
    queue.run((0, 1))
    assert weight.main_grad.eq(4).all()
    with pytest.raises(AssertionError, match=r"left undone: \[\(0, 0\)\]"):
        queue.assert_empty()
    with pytest.raises(AssertionError, match="have not been run"):
        queue.begin((0, 0))
    queue.run((0, 0))
    queue.assert_empty()
    assert weight.main_grad.eq(8).all()


def test_frozen_weights_are_not_queued_and_others_go_to_autograd() -> None:
    queue = WeightGradQueue()
    frozen, plain = (nn.Parameter(torch.zeros(2, 3), requires_grad=trained) for trained in (False, True))
    frozen.main_grad = torch.zeros(2, 3)
    queue.begin(0)
    assert accumulate_weight_grad(frozen, add_four_, queue) is None
    assert torch.equal(accumulate_weight_grad(plain, add_four_, queue), torch.full((2, 3), 4.0))
    assert not queue.defers(plain)
    queue.end()
    queue.run(0)
    assert not frozen.main_grad.any() and plain.grad is None
