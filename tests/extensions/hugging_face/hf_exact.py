"""Random models of `transformers` in fp64 all of whose parts are, to compare this program's with."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.hugging_face.read_config import config_from_hf
from tests.extensions.hugging_face.hf_models import CASES, weights_in
from tests.extensions.hugging_face.whole_models import from_hf, model_of

transformers = pytest.importorskip("transformers")

EXACT = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
EAGER = {"attn_implementation": "eager"}
OPTIONS = {"bloom": EAGER, "gemma2": EAGER, "gpt_oss": EXACT | EAGER, "mimo_v2_flash": EXACT | EAGER}


ONE_PLUS = ("GemmaRMSNorm", "Gemma2RMSNorm", "Gemma3RMSNorm", "Qwen3NextRMSNorm", "Step3p7RMSNorm")
"""Norms whose weights are added to 1."""


class ExactFunctions:
    """torch.nn.functional with a softmax in the dtype of its operand."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    def softmax(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return x.softmax(dim)


class ExactModules:
    """torch.nn with such functions."""

    functional = ExactFunctions()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn, name)


class ExactTorch:
    """torch with fp64 where the gated delta rule of `transformers` asks for fp32."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def random_model(case: str) -> Any:
    """A model of `transformers` in fp64 in which no weight, norm or bias is left at a special value.

    Its RMSNorm, eager softmax and router are fp32 whatever the model's dtype; here all are as precise as the rest. So
    is BLOOM's GeLU, whose constants have eight digits.
    """
    model_type, settings = CASES[case]
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    options = OPTIONS.get(model_type, EXACT)
    return exact(transformers.AutoModelForCausalLM.from_config(config, **options).double().eval())


def exact(model: Any) -> Any:
    """A model in fp64 with such weights, all of whose parts are."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    for module in model.modules():
        if hasattr(module, "embed_scale"):
            module.embed_scale = torch.tensor(float(module.scalar_embed_scale), dtype=torch.float64)
        if type(module).__name__ in ONE_PLUS:
            module.forward = partial(rms_norm, 1 + module.weight, module.eps)
        elif type(module).__name__ == "Llama4TextL2Norm":
            module.forward = partial(rms_norm, 1, module.eps)
        elif type(module).__name__ == "Llama4TextRMSNorm":
            module.forward = partial(rms_norm, module.weight, module.eps)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(rms_norm, module.weight, module.variance_epsilon)
        if type(module).__name__ == "Qwen3NextGatedDeltaNet":
            sys.modules[type(module).__module__].torch = ExactTorch()
        if type(module).__name__ == "Qwen3NextRMSNormGated":
            module.forward = partial(gated_rms_norm, module.weight, module.variance_epsilon)
        if type(module).__name__ == "Step3p7TopKRouter":
            bias = module.e_score_correction_bias
            module.forward = partial(route_by_bias, module.weight, module.top_k, 1.0, bias=bias)
        elif type(module).__name__ == "MiniMaxM2TopKRouter":
            module.forward = partial(route_by_bias, module.weight, module.top_k, 1.0)
        elif type(module).__name__ == "AfmoeTokenChoiceRouter":
            module.forward = partial(route_by_bias, module.gate.weight, module.top_k, module.route_scale)
        elif type(module).__name__.endswith("TopKRouter") and model.config.model_type != "gpt_oss":
            module.forward = partial(route, module.weight, module.top_k, getattr(module, "norm_topk_prob", True))
        for name in ("e_score_correction_bias", "expert_bias"):
            if (bias := getattr(module, name, None)) is not None:
                bias.copy_(torch.randn(len(bias)).float() * 0.1)
        if type(module).__name__ == "DeepseekV2TopkRouter":
            module.forward = partial(route, module.weight, module.top_k, False)
        elif type(module).__name__.endswith("TopkRouter"):
            module.forward = partial(route_in_groups, module)
        if type(module).__name__ == "Gemma2Attention":
            sys.modules[type(module).__module__].nn = ExactModules()
        if type(module).__name__ == "XIELUActivation":
            module.eps.fill_(-1e-6)
        if type(module).__name__ == "BloomGelu":
            module.forward = partial(F.gelu, approximate="tanh")
            sys.modules[type(module).__module__].F = ExactFunctions()
    return model


def route(weight: Tensor, k: int, normalized: bool, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ weight.T
    weights, experts = logits.softmax(-1).topk(k, dim=-1)
    return logits, weights / weights.sum(-1, keepdim=True) if normalized else weights, experts


def route_by_bias(weight: Tensor, k: int, scale: float, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ weight.T
    experts = (logits.sigmoid() + bias).topk(k, dim=-1).indices
    weights = logits.sigmoid().gather(1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) * scale, experts


def route_in_groups(router: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = x.reshape(-1, x.shape[-1]) @ router.weight.T
    scores = logits.sigmoid()
    ranked = (scores + router.e_score_correction_bias).unflatten(-1, (router.num_group, -1))
    groups = ranked.topk(2, dim=-1).values.sum(-1).topk(router.topk_group, dim=-1).indices
    chosen = torch.full_like(ranked, -torch.inf).scatter(1, groups[..., None].expand(-1, -1, ranked.shape[-1]), 0.0)
    experts = (ranked + chosen).flatten(1).topk(router.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    return logits, weights / weights.sum(-1, keepdim=True) * router.routed_scaling_factor, experts


def rms_norm(weight: Tensor | float, eps: float, x: Tensor) -> Tensor:
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gated_rms_norm(weight: Tensor, eps: float, x: Tensor, gate: Tensor) -> Tensor:
    return rms_norm(weight, eps, x) * F.silu(gate)


def weights(model: Any) -> dict[str, Tensor]:
    """The tensors that a file of the model holds: without a tied head, and expert by expert."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return weights_in(Path(folder))


def ours(model: Any) -> GPTModel:
    hf_config = model.config.to_dict()
    config = config_from_hf(hf_config)
    return model_of(from_hf(weights(model), config, hf_config["model_type"]), config)
