"""Hyper-connections against transformers' DeepSeek-V4, the plain layer at one stream, Sinkhorn-Knopp, precision, and
plans.

transformers computes weights in fp32; here its modules are patched to compute them in fp64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.batch import BatchContext
from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import ParallelState
from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.hyper_connections.mixing import Epsilons, MixFunction, doubly_stochastic, stream_weights
from megatron.extensions.planner.flops import model_flops
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import with_fields
from megatron.training.forward_backward import hidden_shape
from tests.extensions.planner.test_planned_activations import SAMPLES, kept_in_bf16
from tests.gpt_cases import FP64, GPT, model_of, packed_documents, random_batch
from tests.pure.test_regions import check_region, compiles

STREAMS, MEAN = model_of("streams"), model_of("streams-mean")
N, H = 3, STREAMS.hidden_size


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """transformers' module of DeepSeek-V4, whose `.float()` leaves fp64 as it is."""
    found = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    monkeypatch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else self.to(torch.float32))
    return found


def set_apart_(model: GPTModel) -> None:
    """Weights of hyper-connections that matter: random biases and factors."""
    generator = torch.Generator().manual_seed(1)
    for name, (parameter, _) in model.named_metas().items():
        if ("hyper_connection" in name or "hc_head" in name) and parameter.ndim == 1:
            parameter.data += torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


class TheirStreams(nn.Module):
    """Our sublayers between transformers' hyper-connections, with the weights of ours."""

    def __init__(self, module: Any, ours: GPTModel) -> None:
        super().__init__()
        self.ours, found = ours, ours.named_metas()
        settings = SimpleNamespace(
            hc_mult=N, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=ours.config.norm_epsilon, hidden_size=H
        )

        def connection(name: str) -> nn.Module:
            weights = {key: found[f"{name}_hyper_connection.{key}"][0] for key in KEYS}
            built = module.DeepseekV4HyperConnection(settings)
            scale = torch.cat([weights[f"alpha_{key}"] for key in ("pre", "post", "res")])
            for key, weight in {"fn": weights["mapping_proj.weight"], "base": weights["bias"], "scale": scale}.items():
                setattr(built, key, nn.Parameter(weight.detach().clone()))
            return built  # type: ignore[no-any-return]

        layers = range(ours.config.num_layers)
        names = [f"decoder.layers.{number}.{of}" for number in layers for of in ("self_attention", "mlp")]
        self.connections = nn.ModuleList(connection(name) for name in names)
        self.head = module.DeepseekV4HyperHead(settings)
        for key in ("fn", "base", "scale"):
            setattr(self.head, f"hc_{key}", nn.Parameter(found[f"decoder.hc_head_{key}"][0].detach().clone()))

    def gradients(self) -> dict[str, Tensor]:
        """By our names."""
        found = {f"decoder.hc_head_{key}": getattr(self.head, f"hc_{key}").grad for key in ("fn", "base", "scale")}
        for number, built in enumerate(self.connections):
            name = f"decoder.layers.{number // 2}.{'mlp' if number % 2 else 'self_attention'}_hyper_connection"
            factors = dict(zip(("alpha_pre", "alpha_post", "alpha_res"), built.scale.grad.split(1), strict=True))
            own = {"mapping_proj.weight": built.fn.grad, "bias": built.base.grad, **factors}
            found |= {f"{name}.{key}": grad for key, grad in own.items()}
        return found

    def forward(self, context: BatchContext, tokens: Tensor) -> Tensor:
        """Logits [s, b, V]; its streams are [b, s, n, h]."""
        decoder = self.ours.decoder
        hidden = self.ours.embedding(tokens, context)  # type: ignore[misc]
        context = decoder._complete(context, hidden)
        streams = hidden.transpose(0, 1).unsqueeze(2).expand(-1, -1, N, -1).contiguous()
        for number, connect in enumerate(self.connections):
            layer = decoder.layers[number // 2]
            post, comb, read = connect(streams)
            f = layer._mlp if number % 2 else layer._attention
            y = f(read.transpose(0, 1).contiguous(), context).transpose(0, 1)
            streams = post.unsqueeze(-1) * y.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams)
        return self.ours.output_layer(decoder.final_layernorm(self.head(streams)).transpose(0, 1))  # type: ignore[misc]


KEYS = ("mapping_proj.weight", "alpha_pre", "alpha_post", "alpha_res", "bias")


@pytest.mark.parametrize("recompute", ["none", "mhc", "full"])
@pytest.mark.parametrize("packed", [False, True])
def test_logits_and_gradients_are_those_of_transformers(theirs: Any, recompute: str, packed: bool) -> None:
    granularity = "selective" if recompute == "mhc" else recompute
    config = replace(STREAMS, recompute_granularity=granularity, recompute_modules=("mhc", "layernorm"))
    batch = random_batch(config, **(packed_documents(config) if packed else {})).local_to(ParallelState().cp)
    model = GPTModel(config, FP64).train()
    set_apart_(model)
    context = BatchContext.of(batch)
    reference = TheirStreams(theirs, model)
    expected = reference(context, batch.tokens)
    weights = torch.linspace(-1, 1, expected.numel(), dtype=torch.float64).view_as(expected)
    (expected * weights).sum().backward()
    gradients = reference.gradients()
    gradients |= {
        name: p.grad for name, (p, _) in model.named_metas().items() if p.grad is not None and name not in gradients
    }
    gradients = {name: grad.clone() for name, grad in gradients.items()}
    model.zero_grad()
    logits = model.output_layer(model.hidden_states(None, batch))  # type: ignore[misc]
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9 * float(expected.detach().abs().max()))
    (logits * weights).sum().backward()
    assert gradients.keys() == model.named_metas().keys()
    for name, (parameter, _) in model.named_metas().items():
        wanted = gradients[name]
        assert (parameter.grad - wanted).norm() <= 1e-9 * wanted.norm(), name


def test_one_stream_with_open_gates_is_the_plain_layer() -> None:
    """To the bit, forward and backward: what a sublayer reads, the matrix and the factor of its output are 1."""
    plain = GPTModel(GPT, FP64).train()
    options = {"enable_mhc_connections": True, "mhc_num_residual_streams": 1, "mhc_init_gating_factor": 0.0}
    config = with_fields(GPT, options | {"mhc_epsilon": 0.0})
    model = GPTModel(config, FP64).train()
    for name, (parameter, _) in model.named_metas().items():
        if name.endswith("hyper_connection.bias"):
            parameter.data.copy_(torch.tensor([40.0, 0.0, 0.0]))
        elif name.endswith("hc_head_base"):
            parameter.data.fill_(40.0)
    batch = random_batch(GPT)
    losses = [each(None, batch) for each in (plain, model)]
    for loss in losses:
        loss.backward()
    assert losses[0].equal(losses[1])
    found = model.named_metas()
    for name, (parameter, _) in plain.named_metas().items():
        assert parameter.equal(found[name][0]) and parameter.grad.equal(found[name][0].grad), name


def test_matrices_are_doubly_stochastic() -> None:
    logits = torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = doubly_stochastic(logits, 200, 0.0)
    ones = torch.ones(50, 4, dtype=torch.float64)
    for dim in (-1, -2):
        torch.testing.assert_close(found.sum(dim), ones, rtol=1e-6, atol=0)
    assert found.min() >= 0
    torch.testing.assert_close(doubly_stochastic(logits, 20, 1e-6).sum(-2), ones, rtol=1e-5, atol=0)


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...], Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = (6, 2, N, 8), (6, 2, N * (N + 2)), (1,), (1,), (1,), (N * (N + 2),)
    x, projected, *factors, bias = (torch.randn(each, generator=generator, dtype=torch.float64) for each in shapes)
    wide = torch.promote_types(dtype, torch.float32)
    return x.to(dtype), projected.to(wide), tuple(factor.to(dtype) for factor in factors), bias.to(dtype)


def test_weights_of_sixteen_bits_are_computed_in_fp32() -> None:
    x, projected, factors, bias = operands(torch.bfloat16)
    read, post, res = stream_weights(x, projected, factors, bias, 20, Epsilons(1e-5, 1e-6))
    assert read.dtype == torch.bfloat16 and post.dtype == res.dtype == torch.float32
    wide = x.float(), projected, tuple(factor.float() for factor in factors), bias.float()
    expected = stream_weights(*wide, 20, Epsilons(1e-5, 1e-6))
    assert read.equal(expected[0].bfloat16()) and post.equal(expected[1]) and res.equal(expected[2])
    y = x[:, :, 0]
    found, whole = (MixFunction.apply(*each, False) for each in ((x, post, res, y), (x.float(), post, res, y.float())))
    assert found.equal(whole.bfloat16())


def test_gradients_of_the_mix() -> None:
    x, projected, factors, bias = operands(torch.float64)
    _, post, res = stream_weights(x, projected, factors, bias, 3, Epsilons(1e-5, 1e-2))
    given = [each.detach().clone().requires_grad_() for each in (x, post, res, x[:, :, 1])]
    assert torch.autograd.gradcheck(lambda *each: MixFunction.apply(*each, False), given)


def test_streams_are_kept_once_in_a_layer() -> None:
    """--recompute-modules mhc drops the streams between the two sublayers of a layer: in two layers, two of
    four sets of streams in bf16."""
    tokens = SAMPLES * STREAMS.seq_length
    kept, again = (
        kept_in_bf16(STREAMS, recompute_granularity="selective", recompute_modules=modules)
        for modules in (("mlp_act",), ("mlp_act", "mhc"))
    )
    assert kept - again == 2 * tokens * N * H * 2


def test_streams_alone_are_kept_for_their_weights() -> None:
    """A sublayer keeps its streams, its input that a norm kept anyway, its output, and fp32 weights; beside one stream
    no projection and no iteration of Sinkhorn-Knopp."""
    plain = with_fields(STREAMS, {"enable_mhc_connections": False})
    tokens, sublayers = SAMPLES * STREAMS.seq_length, 4
    of_streams, of_output, of_weights = N * H * 2, H * 2, (N + N * N) * 4
    assert kept_in_bf16(STREAMS) - kept_in_bf16(plain) <= sublayers * tokens * (of_streams + of_output + of_weights)


@pytest.mark.parametrize("config", [STREAMS, MEAN])
def test_counts(config: TransformerConfig) -> None:
    """Parameters, and FLOPs of the projections: 6 for each weight and token."""
    plain = with_fields(config, {"enable_mhc_connections": False})
    n, h = config.residual_size // config.hidden_size, config.hidden_size
    layers, depths, learned = config.num_layers, config.mtp_depths, config is STREAMS
    connections, ends = 2 * (layers + depths), (1 + depths) if learned else 0
    matrices = connections * n * (n + 2) * n * h + ends * n * n * h
    vectors = connections * (3 + n * (n + 2)) + ends * (n + 1)
    assert count_parameters(config).total - count_parameters(plain).total == matrices + vectors
    assert model_flops(config).matmul - model_flops(plain).matmul == 6 * matrices
    assert model_flops(config).attention == model_flops(plain).attention


def test_stages_send_all_streams() -> None:
    flags = "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 9 --mock-data"
    config = parse_args(f"{flags} --enable-hyper-connections --num-residual-streams 3 --micro-batch-size 2".split())
    assert hidden_shape(config, 1) == (8, 2, 48)


def weighted_streams(x: Tensor, compiled: bool) -> Tensor:
    streams = x[..., : N * 8].unflatten(-1, (N, 8))
    projected, factors = x[..., : N * (N + 2)], (x[0, 0, :1], x[0, 0, 1:2], x[0, 0, 2:3])
    weights = region(stream_weights, compiled)
    read, post, res = weights(streams, projected, factors, x[0, 1, : N * (N + 2)], 3, Epsilons(1e-5, 1e-2))
    return MixFunction.apply(streams, post, res, read, compiled).flatten(-2)


@compiles
def test_the_compiled_regions_are_the_plain_ones() -> None:
    check_region(weighted_streams)
