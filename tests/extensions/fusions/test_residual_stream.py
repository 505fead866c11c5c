"""Tests of the fused residual stream. With --compile, a layer defers its last residual addition, which is fused into
the next norm. The tests run regions uncompiled and compare them with a model that uses plain additions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron.core import compiled_regions, kernels
from megatron.core.batch import Batch
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.kernels import KERNELS
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel import layers
from megatron.core.tensor_parallel.linear_gemms import residual_gemm
from megatron.core.transformer.layer import TransformerLayer
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fusions import fused_norm, gemm_choice
from megatron.extensions.speed.fusions.flags import Fusions
from megatron.extensions.speed.fusions.fused_norm import add_update
from megatron.extensions.speed.fusions.kernels import cublaslt
from megatron.extensions.speed.fusions.layer import FusedTransformerLayer, takes_addend
from megatron.testing.local_run import local_run
from megatron.training.train_step import train_step
from tests.dist.test_unit_sharding import Watch, sharding
from tests.dist.test_unit_sharding import config as config_of
from tests.gpt_cases import FP64, GPT, STYLES, random_batch
from tests.harness import run_world

COMPILED = replace(FP64, compile=True)
RECOMPUTED = {"recompute_granularity": "full", "recompute_num_layers": 2}


def selective(module: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": (module,)}


STREAMS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "rmsnorm": ("llama", {}, 0, 6),
    "biases": ("gpt", {}, 0, 6),
    "dropout": ("gpt", {"hidden_dropout": 0.3}, 0, 0),
    "multi-token prediction": ("gpt", {"mtp_num_layers": 1}, 0, 8),
    "norms before and after": ("llama", {"norm_placement": "sandwich"}, 0, 0),
    "norms after": ("llama", {"norm_placement": "output"}, 6, 0),
    "parallel": ("gpt", {"parallel_residual": True}, 3, 0),
    "factor of residuals": ("llama", {"residual_multiplier": 0.5}, 0, 0),
    "two layers recomputed": ("llama", {"recompute_method": "block", **RECOMPUTED}, 2, 10),
    "pairs recomputed": ("llama", {"recompute_method": "uniform", **RECOMPUTED}, 2, 12),
    "mlp recomputed": ("llama", selective("mlp"), 0, 9),
    "activation recomputed": ("llama", selective("mlp_act"), 0, 6),
    "norms recomputed": ("llama", selective("layernorm"), 0, 0),
}
"""Each case consists of the style, the settings, the number of additions in separate kernels, and the number of GEMMs
that add to the residual stream directly. Both numbers are for 3 layers."""


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the first operand of each residual addition that is not fused into a norm."""
    found: list[Tensor] = []

    def noted(x: Tensor, *args: Any) -> Tensor:
        found.append(x)
        return add_update(x, *args)

    monkeypatch.setattr(fused_norm, "add_update", noted)
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    return found


def add_in_products(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Record the residuals that GEMMs add to their results. The GEMM with a fused addition, which normally runs only on
    GPUs for 16-bit operands, is also used for CPU tensors."""
    found: list[Tensor] = []

    def noted(x: Tensor, weight: Tensor, addend: Tensor, *args: Any) -> Tensor:
        found.append(addend)
        return gemm_choice.RESIDUAL_GEMM.plain(x, weight, addend, *args)

    kernel = replace(gemm_choice.RESIDUAL_GEMM, run=noted, suits=lambda *operands: True)
    monkeypatch.setattr(kernels, "_kernel", lambda name: kernel if name == "residual_gemm" else KERNELS[name])
    return found


@pytest.fixture
def addends(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    return add_in_products(monkeypatch)


def loss_and_gradients(model: GPTModel, batch: Batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = model(None, batch)
    loss.backward()
    named = {name: parameter.grad.clone() for name, (parameter, _) in model.named_metas().items()}
    return {"loss": loss.detach()} | named


@pytest.mark.parametrize("case", STREAMS)
def test_deferred_additions_are_made(case: str, added: list[Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    style, settings, left, in_products = STREAMS[case]
    config = replace(STYLES[style], num_layers=3, **settings)
    batch = random_batch(config)
    in_norms = loss_and_gradients(GPTModel(config, COMPILED), batch)
    assert len(added) == left
    addends = add_in_products(monkeypatch)
    plain = loss_and_gradients(GPTModel(config, FP64), batch)
    assert not addends, "GEMMs add to the stream only with --compile"
    model = GPTModel(config, COMPILED)
    for found in (in_norms, loss_and_gradients(model, batch)):
        torch.testing.assert_close(found, plain, rtol=1e-11, atol=1e-13)
    assert len(addends) == in_products
    model.eval()(None, batch)
    assert len(addends) == in_products


def test_outputs_for_ranks_or_hooks_are_not_added_in_gemms(added: list[Tensor], addends: list[Tensor]) -> None:
    """Partial sums must be reduced over ranks before they are added to the residual stream. A forward hook must receive
    the output of a module without the residual."""
    model = GPTModel(replace(STYLES["llama"], num_layers=3), COMPILED)
    blocks = list(model.decoder.layers)
    assert all(takes_addend(block.mlp) and takes_addend(block.self_attention) for block in blocks)
    blocks[0].mlp.linear_fc2.boundary = layers.ROW
    blocks[0].self_attention.linear_proj.boundary = layers.ROW_SEQUENCE
    for module in (blocks[1].mlp, blocks[1].self_attention.linear_proj):
        module.register_forward_hook(lambda module, args, output: None)
    assert not any(takes_addend(block.mlp) or takes_addend(block.self_attention) for block in blocks[:2])
    gemm_choice.keep_additions_in_norms([model])
    assert not takes_addend(blocks[2].mlp)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "rowwise", "blockwise"])
def test_fp8_gemms_add_to_the_stream_within_rounding(recipe: str, added: list[Tensor], addends: list[Tensor]) -> None:
    """Only fp8 recipes with one scale per operand (delayed and tensorwise) let GEMMs add their result to the residual
    stream. The last bit of a sum decides between two fp8 numbers that are 6 % apart."""
    config = replace(STYLES["llama"], num_layers=2)
    options = (Fp8Flags(fp8_format="hybrid", fp8_recipe=recipe),)
    fp8 = ModelParallelConfig(bf16=True, compile=True, extension_options=options)
    batch, found = random_batch(config), list[dict[str, Tensor]]()
    for adds in (True, False):
        model = GPTModel(config, fp8)
        if not adds:
            gemm_choice.keep_additions_in_norms([model])
        loss = model(None, batch)
        trained = {name: weight for name, (weight, _) in model.named_metas().items() if weight.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()))
        found.append({"loss": loss.detach(), **dict(zip(trained, gradients, strict=True))})
    assert len(addends) == (4 if recipe in ("delayed", "tensorwise") else 0)
    for name, one in found[0].items():
        assert (one - found[1][name]).norm() <= 0.1 * found[1][name].norm(), name


def test_sums_are_rounded_once() -> None:
    torch.manual_seed(1)
    x, weight, stream, bias = (torch.randn(size).bfloat16() for size in ((64, 48), (32, 48), (64, 32), (32,)))
    exact = x.double() @ weight.double().t() + bias.double() + stream.double()
    found = residual_gemm(x, weight, stream, bias)
    twice = torch.nn.functional.linear(x, weight, bias) + stream
    assert (found.double() - exact).norm() < (twice.double() - exact).norm()
    torch.testing.assert_close(found, exact.bfloat16(), rtol=2.0**-8, atol=1e-5)


def test_gemms_add_to_the_stream_only_if_correct_and_fast(
    added: list[Tensor], addends: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(STYLES["gpt"], num_layers=2)
    model = GPTModel(config, replace(ModelParallelConfig(bf16=True), compile=True))

    def product(x: Tensor, weight: Tensor, *args: Any) -> Tensor:
        sums = residual_gemm.__wrapped__(x, weight, *args)  # type: ignore[attr-defined]
        if x.shape[1] == config.ffn_size:
            sums[-1, -1] += 1e3
        return sums

    monkeypatch.setattr(cublaslt, "residual_product", product)
    seconds = iter([0.1, 0.2, 0.3])

    def clock(run: Any) -> float:
        run()
        return next(seconds)

    found = gemm_choice.choose_additions([model], 64, Axis(), torch.device("cpu"), clock)
    names = {shape.inputs: gemm_choice.place_of(choice) for shape, choice in found.items()}
    assert names == {config.hidden_size: "GEMM", config.ffn_size: "norm"}
    for block in model.decoder.layers:
        assert takes_addend(block.self_attention) and not takes_addend(block.mlp)
    near, slow = (gemm_choice.Choice({"GEMM": seconds, "norm": 1.0}) for seconds in (1.05, 1.2))
    assert [gemm_choice.place_of(choice) for choice in (near, slow)] == ["GEMM", "norm"]


def test_hooks_of_a_layer_see_the_sum(added: list[Tensor]) -> None:
    config = replace(STYLES["llama"], num_layers=3)
    batch, seen = random_batch(config), dict[bool, list[Tensor]]()
    for compiled in (False, True):
        model = GPTModel(config, COMPILED if compiled else FP64)
        found = seen.setdefault(compiled, [])
        observed = model.decoder.layers[1]
        observed.register_forward_hook(lambda module, args, output, found=found: found.extend((args[0], output)))
        found += loss_and_gradients(model, batch).values()
    torch.testing.assert_close(seen[True], seen[False], rtol=1e-11, atol=1e-13)


def test_compiled_regions_build_fused_layers() -> None:
    compiled = ModelParallelConfig(compile=True)
    for config, parallel, kind in (
        (GPT, compiled, FusedTransformerLayer),
        (GPT, ModelParallelConfig(), TransformerLayer),
        (GPT.with_options(Fusions(fusions=False)), compiled, TransformerLayer),
    ):
        assert {type(layer) for layer in GPTModel(config, parallel).decoder.layers} == {kind}


def _streams(rank: int, world_size: int, flags: str) -> tuple[list[bool], tuple[int, int]]:
    """Run two training steps, and return two values.

    The first value is a list with one boolean per layer, which is True if the first norm of the layer adds the deferred
    update of the preceding layer. One more boolean states the same for the first layer after a forward hook has been
    registered. The second value is a tuple of two numbers, measured in the second step: the largest number of sharding
    units (such as layers) whose parameters are unsharded at the same time, and the largest number of units whose
    gradients are unsharded.
    """
    with local_run(config_of(flags, world_size), rank, world_size) as run:
        train_step(run)
        watch = Watch(run)
        train_step(run)
        layers: Any = run.stages[0].decoder.layers  # type: ignore[union-attr]
        streams = [layer.takes_pending() for layer in layers]
        layers[0].register_forward_hook(lambda *seen: None)
        return [*streams, layers[0].takes_pending()], (watch.params, watch.grads)


def test_hooks_of_units_leave_additions_and_norms_fused() -> None:
    """Layers may exchange one tensor, or two tensors that the next norm adds. In both cases, the backward hooks of
    sharded units run at the same points."""
    with mock.patch.object(compiled_regions, "_compiled", lambda function, static: function):
        found = run_world(2, _streams, f"--global-batch-size 6 --compile {sharding('optim_grads_params')}")
    assert found == [([True] * 4 + [False], (2, 2))] * 2
