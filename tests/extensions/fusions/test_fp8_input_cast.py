"""Tests of fusing fp8 casts and bias gradient sums into the operations before and after linear layers. The fused model
equals the model without these fusions. Both models are bit-identical if the order of rounding is the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron.core import compiled_regions, kernels
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import Axis
from megatron.core.tensor_parallel.layers import ParallelLinear
from megatron.core.tensor_parallel.linear_gemms import OutputGradient
from megatron.core.transformer import activations
from megatron.extensions.speed.fp8.flags import Fp8Flags
from megatron.extensions.speed.fp8.recipes import DelayedGemms, DelayedScaling
from megatron.extensions.speed.fusions.layer import FusedTransformerLayer
from megatron.testing.snapshot import first_difference, train_in_world
from tests.extensions.fp8.test_parity import flags_of
from tests.gpt_cases import GPT, LLAMA, random_batch, with_dropout

FULL: dict[str, Any] = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "llama without positions": replace(LLAMA, position_embedding_type="none"),
    "llama without gates": replace(LLAMA, swiglu=False, squared_relu=True),
    "parallel residual": replace(GPT, parallel_residual=True),
    "recomputed": replace(LLAMA, **FULL),
    "recomputed norms": replace(LLAMA, recompute_granularity="selective", recompute_modules=("layernorm",)),
    "dropout": with_dropout(GPT, attention=0.0),
}
GIVEN = {
    # The numbers are for a model with two layers. The forward pass casts the inputs of fc1 and qkv. The backward pass
    # casts the
    # gradients of proj, fc2 and qkv, and sums the bias gradients.
    ("gpt", True): {"inputs": 4, "casts": 4, "sums": 4},
    ("gpt", False): {"sums": 4},
    ("llama", True): {"inputs": 4, "casts": 6},
    ("llama without positions", True): {"inputs": 4, "casts": 4},
    ("llama", False): {},
    ("llama without gates", True): {"inputs": 4, "casts": 6},
    ("parallel residual", True): {"inputs": 4, "casts": 2, "sums": 2},
    ("recomputed", True): {"inputs": 8, "casts": 4},
    ("recomputed norms", True): {"casts": 6},
    ("dropout", True): {"inputs": 1},
    ("dropout", False): {},
}
"""Expected numbers of operations that are fused into neighboring modules, per micro-batch, keyed by (model, fp8). The
operations are casts of layer inputs, casts of output gradients, and sums of bias gradients. The casts that SwiGLU makes
for the linear layers of the MLP are not counted."""


def trained(name: str, fp8: bool, given: Counter[str], monkeypatch: pytest.MonkeyPatch, gives: bool) -> list[Tensor]:
    """Run two steps, and return the losses, the gradients and the amax histories."""
    take, order = OutputGradient.take, DelayedGemms.given_input

    def counted_take(self: OutputGradient, grad: Tensor) -> Any:
        casts, row_sum = take(self, grad)
        given.update({"casts": casts is not None, "sums": row_sum is not None})
        return casts, row_sum

    def counted_input(self: DelayedGemms, *args: Any) -> Any:
        given["inputs"] += 1
        return order(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(compiled_regions, "_compiled", lambda function, static: function)
        patch.setattr(OutputGradient, "take", counted_take)
        patch.setattr(DelayedGemms, "given_input", counted_input)
        if not gives:
            patch.setattr(ParallelLinear, "output_gradient", lambda self, bias: None)
            patch.setattr(FusedTransformerLayer, "_cast_of", lambda self, sublayer: None)
        config = MODELS[name]
        options = (Fp8Flags(fp8_format="hybrid" if fp8 else None),)
        parallel = ModelParallelConfig(bf16=True, compile=True, extension_options=options)
        model, found = GPTModel(config, parallel), []
        scaling = DelayedScaling(parallel.options(Fp8Flags), [model], Axis())
        for step in range(2):
            loss = model(None, random_batch(config, seed=step))
            params = [param for param in model.parameters() if param.requires_grad]
            found += [loss.detach(), *torch.autograd.grad(loss, params)]
            scaling.end_step(torch.zeros(()))
        return found + [layer.amax_history.clone() for layer in scaling.layers]


@pytest.mark.parametrize(("name", "fp8"), GIVEN)
def test_fused_casts_equal_those_of_the_layer(name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given, none = Counter[str](), Counter[str]()
    with_neighbours = trained(name, fp8, given, monkeypatch, gives=True)
    alone = trained(name, fp8, none, monkeypatch, gives=False)
    assert given - none == Counter({kind: 2 * count for kind, count in GIVEN[name, fp8].items()})
    assert bool(+none) == (fp8 and MODELS[name].swiglu)
    for one, two in zip(with_neighbours, alone, strict=True):
        assert two.isfinite().all()
        # the unfused model computes the gradient of the rotary embedding in bf16, not in fp32 as compiled code does
        if MODELS[name].position_embedding_type == "rope":
            assert (one - two).norm() <= 0.03 * two.norm()
        else:
            assert torch.equal(one, two)


def test_hooks_see_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a module has a hook, its input and its output gradient must not be cast by neighboring modules, so that the
    hook receives uncast values."""
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    parallel = ModelParallelConfig(bf16=True, compile=True, extension_options=(Fp8Flags(fp8_format="hybrid"),))
    model, seen = GPTModel(LLAMA, parallel), []

    def see(module: Any, inputs: Any, output: Any) -> None:
        for x in tree_leaves((inputs, output)):
            if isinstance(x, Tensor):
                seen.append(x)
                if x.requires_grad:
                    x.register_hook(seen.append)

    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("input_layernorm", "self_attention", "linear_qkv", "linear_fc1", "linear_fc2"):
            module.register_forward_hook(see)
    model(None, random_batch(LLAMA)).backward()
    assert len(seen) > 2 * 2 * 2 * 5 and all(x.isfinite().all() for x in seen)


def swiglu_in_fp32(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_gradient_in_fp32(x: Tensor, grad: Tensor) -> Tensor:
    wide = x.float().requires_grad_()
    with torch.enable_grad():
        gate, up = wide.chunk(2, dim=-1)
        return torch.autograd.grad(F.silu(gate) * up, wide, grad.float())[0].to(x.dtype)


LAYOUTS = [
    (2, "--tp 2 --sequence-parallel"),
    (1, "--recompute-granularity full --recompute-method uniform"),
    (2, "--pp 2 --pipeline-schedule zb-h1"),
]


@pytest.mark.grid(("world_size", "layout"), LAYOUTS[:1], LAYOUTS)
def test_casts_in_other_kernels_change_no_bit(world_size: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the fused regions uncompiled. As in compiled code, the results of a region are rounded only once, at the end
    of the region."""
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    monkeypatch.setitem(activations.FUNCTIONS, "swiglu", (swiglu_in_fp32, swiglu_gradient_in_fp32))
    # `_regions_of` has cached the unpatched functions, so call `functions_of` instead
    monkeypatch.setattr(activations, "_regions_of", activations.functions_of)
    flags = flags_of("delayed", f"--compile --swiglu --disable-bias-linear {layout}")
    within = train_in_world(world_size, flags, steps=2)
    monkeypatch.setattr(kernels, "LEFT_OUT", {"mlp"})
    monkeypatch.setattr(ParallelLinear, "output_gradient", lambda self, bias: None)
    monkeypatch.setattr(FusedTransformerLayer, "_cast_of", lambda self, sublayer: None)
    assert first_difference(train_in_world(world_size, flags, steps=2), within, 0.0) is None
