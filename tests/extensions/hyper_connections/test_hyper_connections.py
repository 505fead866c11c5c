"""Tests of hyper-connections. A layer with a single stream equals a plain layer. Precision and memory plans are also
tested. The tests in tests/extensions/hugging_face compare logits and gradients with those of DeepSeek-V4."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron.core.compiled_regions import region
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.layers.hyper_connections.mixing import Epsilons, MixFunction, stream_weights
from megatron.extensions.plan.planner.flops import model_flops
from megatron.training.config.arguments import parse_args
from megatron.training.config.flags import with_fields
from megatron.training.forward_backward import hidden_shape
from tests.extensions.planner.test_planned_activations import SAMPLES, kept_in_bf16
from tests.gpt_cases import FP64, GPT, model_of, random_batch
from tests.pure.test_regions import check_region, compiles

STREAMS, MEAN = model_of("streams"), model_of("streams-mean")
N, H = 3, STREAMS.hidden_size


def test_one_stream_with_open_gates_is_the_plain_layer() -> None:
    """The loss and the gradients are bit-identical to those of the layer without hyper-connections, because all
    hyper-connection weights (the input weight, the 1 x 1 mixing matrix and the output factor of each sublayer) are
    1."""
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


def test_initial_factors_match_megatron() -> None:
    """The output factor of the streams after the last layer is initialized to 1. --mhc-init-gating-factor initializes
    only the factors of sublayers."""
    found = {name: p for name, (p, _) in GPTModel(STREAMS, FP64).named_metas().items()}
    sums = [p for name, p in found.items() if name.endswith("hc_head_scale")]
    gates = [p for name, p in found.items() if ".alpha_" in name]
    assert sums and all((p == 1).all() for p in sums)
    assert gates and all((p == 0.5).all() for p in gates)


def test_connection_weights_are_computed_in_fp32() -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = (6, 2, N, 8), (6, 2, N * (N + 2)), (1,), (1,), (1,), (N * (N + 2),)
    x, projected, *factors, bias = (torch.randn(each, generator=generator).bfloat16() for each in shapes)
    projected = projected.float()
    read, post, res = stream_weights(x, projected, tuple(factors), bias, 20, Epsilons(1e-5, 1e-6))
    assert read.dtype == torch.bfloat16 and post.dtype == res.dtype == torch.float32
    wide = x.float(), projected, tuple(factor.float() for factor in factors), bias.float()
    expected = stream_weights(*wide, 20, Epsilons(1e-5, 1e-6))
    assert read.equal(expected[0].bfloat16()) and post.equal(expected[1]) and res.equal(expected[2])
    y = x[:, :, 0]
    found, whole = (MixFunction.apply(*each, False) for each in ((x, post, res, y), (x.float(), post, res, y.float())))
    assert found.equal(whole.bfloat16())


def test_streams_are_saved_once_per_layer() -> None:
    """--recompute-modules mhc does not save the streams between the two sublayers of a layer. In this model with two
    layers, two of the four sets of bf16 streams are therefore not saved."""
    tokens = SAMPLES * STREAMS.seq_length
    selective, both = {"recompute_granularity": "selective"}, (("mlp_act",), ("mlp_act", "mhc"))
    kept, again = (kept_in_bf16(STREAMS, **selective, recompute_modules=modules) for modules in both)
    assert kept - again == 2 * tokens * N * H * 2


def test_only_streams_outputs_and_weights_are_saved() -> None:
    """Each sublayer with hyper-connections saves more than a plain sublayer: its residual streams, its output and its
    fp32 connection weights. The sublayer saves neither projections nor intermediate results of Sinkhorn-Knopp
    iterations."""
    plain = with_fields(STREAMS, {"enable_mhc_connections": False})
    tokens, sublayers = SAMPLES * STREAMS.seq_length, 4
    of_streams, of_output, of_weights = N * H * 2, H * 2, (N + N * N) * 4
    assert kept_in_bf16(STREAMS) - kept_in_bf16(plain) <= sublayers * tokens * (of_streams + of_output + of_weights)


@pytest.mark.parametrize("config", [STREAMS, MEAN])
def test_parameter_and_flop_counts(config: TransformerConfig) -> None:
    """The projections of hyper-connections have additional parameters. Each weight of these projections costs 6 FLOPs
    per token."""
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
def test_the_compiled_regions_match_the_plain_ones() -> None:
    check_region(weighted_streams)
