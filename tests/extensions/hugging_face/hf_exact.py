"""Random models of `transformers` that compute everything in fp64, for comparison with this program's models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.interop.hugging_face.read_config import family_of
from tests.extensions.hugging_face.hf_models import CASES, weights_in
from tests.extensions.hugging_face.whole_models import gradients_of, to_hf

transformers = pytest.importorskip("transformers")

EXACT = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
EAGER = {"attn_implementation": "eager"}
OPTIONS = dict.fromkeys(
    ("bloom", "flint", "gemma2", "gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "vaultgemma"),
    EXACT | EAGER,
)
"""Construction options of models that need eager attention for score caps, sinks or biases, keyed by model type."""


class Fp64(TorchFunctionMode):
    """Torch function mode that computes in fp64 wherever code requests fp32: norms, softmaxes, routers, positions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        func = Tensor.double if func is Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        named = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **named)


@contextmanager
def fp64() -> Iterator[None]:
    """Use fp64 instead of fp32 within the context, including as torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        with Fp64():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def random_model(case: str) -> Any:
    return model_with(*CASES[case])


def save_model(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save the random model of a case as a Hugging Face folder."""
    random_model(case).to(dtype).save_pretrained(folder)
    return folder


def model_with(model_type: str, settings: Mapping[str, Any]) -> Any:
    """Return a model of `transformers` in which no weight, norm or bias keeps a special value."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(model_type, **settings)
    build = partial(transformers.AutoModelForCausalLM.from_config, config, dtype=torch.float64)
    try:
        model = build(**OPTIONS.get(model_type, EXACT))
    except ValueError:  # some models support only eager attention
        model = build(**EAGER)
    return exact(model.eval())


@torch.no_grad()
def exact(model: Any) -> Any:
    """Fill a model with random weights, none of which keeps a special value such as 0 or 1. Replace BLOOM's GeLU, whose
    constants have only eight digits, with torch's. Also make the embedding of the padding token receive gradients."""
    for parameter in model.parameters():
        parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.rand(len(buffer), model.config.n_routed_experts).topk(buffer.shape[1]).indices)
        elif name.endswith("layer_scalar"):
            # as in published files, the values are bf16 numbers, which fp32 represents exactly
            buffer.copy_((torch.rand_like(buffer) + 0.5).bfloat16())
        elif is_state(name):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    for module in model.modules():
        if type(module).__name__ == "BloomGelu":
            module.forward = lambda x: F.gelu(x, approximate="tanh")
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def is_state(name: str) -> bool:
    """Return True if `name` is the name of a buffer that is saved in files but not trained."""
    return name.endswith(("e_score_correction_bias", "expert_bias", "tid2eid", "layer_scalar"))


def weights(model: Any) -> dict[str, Tensor]:
    """Return the weights as the model's files contain them: under published names, without a tied output layer, and
    with separate tensors for each expert. For LongCat-Flash, leave out the weights of zero-computation experts. The
    transformers class has these unused weights, but published files do not contain them."""
    family = family_of({"model_type": model.config.model_type})
    ignored = tuple(family.ignored)
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = {name: each for name, each in weights_in(Path(folder)).items() if not name.endswith(ignored)}
    for other, usual in family.renamed.items():
        found = {name.replace(other, usual): each for name, each in found.items()}
    if model.config.model_type == "olmo_hybrid":
        found |= dict(by_width(found, model.config))
    real = model.config.n_routed_experts if model.config.model_type == "longcat_flash" else len(found)
    return {
        name: each
        for name, each in found.items()
        if (expert := re.search(r"experts\.(\d+)\.", name)) is None or int(expert[1]) < real
    }


def by_width(found: Mapping[str, Tensor], config: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and weights of Olmo Hybrid's convolutions, split by the widths of queries, keys and values.
    When transformers saves these convolutions, it splits all channels into three equal parts instead."""
    keys, values = (
        getattr(config, f"linear_num_{kind}_heads") * getattr(config, f"linear_{kind}_head_dim")
        for kind in ("key", "value")
    )
    for first in (name for name in found if name.endswith("q_conv1d.weight")):
        names = [first.replace("q_conv1d", f"{each}_conv1d") for each in "qkv"]
        whole = torch.cat([found[name] for name in names])
        yield from zip(names, (part.clone() for part in whole.split((keys, keys, values))), strict=True)


def wrong_gradients(
    theirs: Any, mine: GPTModel, tokens: Tensor, model_type: str, weights: Callable[[Any], dict[str, Tensor]] = weights
) -> list[str]:
    """Return the names of the transformers model's weights whose loss gradients differ from this program's. As a side
    effect, each weight of the transformers model is overwritten with its gradient."""
    logits = theirs(tokens, use_cache=False).logits[:, :-1]
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    batch = Batch.of_tokens(tokens)
    found = gradients_of(mine, batch, batch.num_tokens)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        for name, buffer in theirs.named_buffers():
            if is_state(name):
                buffer.zero_()
    config: TransformerConfig = mine.config
    back, expected = to_hf(found, config, model_type), weights(theirs)
    if back.keys() != expected.keys():
        return sorted(back.keys() ^ expected.keys())
    norms = {name: (each.double().norm(), (back[name] - each).double().norm()) for name, each in expected.items()}
    return [name for name, (whole, wrong) in norms.items() if wrong > 1e-9 * whole.clamp(min=1e-5)]
