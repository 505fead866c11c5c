"""The residual stream between layers: with --compile the next norm adds what a layer leaves to add. Regions run
uncompiled here; what is compared is the model of plain additions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core import compiled_regions
from megatron.core.batch import Batch
from megatron.core.dropout import add_update
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import layer, norm
from tests.gpt_cases import FP64, STYLES, random_batch

COMPILED = replace(FP64, compile=True)
RECOMPUTED = {"recompute_granularity": "full", "recompute_num_layers": 2}
STREAMS: dict[str, tuple[str, dict[str, Any], int]] = {
    "pre-norm": ("llama", {}, 0),
    "dropout": ("gpt", {"hidden_dropout": 0.3}, 0),
    "multi-token prediction": ("gpt", {"mtp_num_layers": 1}, 0),
    "norms before and after": ("llama", {"norm_placement": "sandwich"}, 0),
    "norms after": ("llama", {"norm_placement": "output"}, 6),
    "parallel": ("gpt", {"parallel_residual": True}, 3),
    "two layers recomputed": ("llama", {"recompute_method": "block", **RECOMPUTED}, 2),
    "pairs recomputed": ("llama", {"recompute_method": "uniform", **RECOMPUTED}, 2),
}
"""Style, settings, and how many additions of 3 layers are left to kernels of their own."""


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Operands of additions outside of norms."""
    found: list[Tensor] = []

    def noted(x: Tensor, *args: Any) -> Tensor:
        found.append(x)
        return add_update(x, *args)

    for module in (layer, norm):
        monkeypatch.setattr(module, "add_update", noted)
    monkeypatch.setattr(compiled_regions, "_compiled", lambda function, static: function)
    return found


def loss_and_gradients(stages: list[GPTModel], batch: Batch) -> dict[str, Tensor]:
    hidden = None
    for stage in stages:
        stage.zero_grad()
        hidden = stage(hidden, batch)
        assert isinstance(hidden, Tensor)
    assert hidden is not None
    hidden.backward()
    named = {name: parameter for stage in stages for name, (parameter, _) in stage.named_metas().items()}
    return {"loss": hidden.detach()} | {name: parameter.grad.clone() for name, parameter in named.items()}


@pytest.mark.parametrize("case", STREAMS)
def test_the_next_norm_adds_what_a_layer_leaves_to_add(case: str, added: list[Tensor]) -> None:
    style, settings, left = STREAMS[case]
    config = replace(STYLES[style], num_layers=3, **settings)
    batch = random_batch(config)
    plain = loss_and_gradients([GPTModel(config, FP64)], batch)
    added.clear()
    model = GPTModel(config, COMPILED)
    torch.testing.assert_close(loss_and_gradients([model], batch), plain, rtol=1e-11, atol=1e-13)
    assert len(added) == left


def test_stages_send_the_sum(added: list[Tensor]) -> None:
    config = replace(STYLES["llama"], num_layers=4)
    batch = random_batch(config)
    plain = loss_and_gradients([GPTModel(config, FP64)], batch)
    added.clear()
    cuts = [(0, 2), (2, 2), (2, 4)]
    stages = [GPTModel(config, COMPILED, layers=range(*cut), first=cut == (0, 2), last=cut == (2, 4)) for cut in cuts]
    torch.testing.assert_close(loss_and_gradients(stages, batch), plain, rtol=1e-11, atol=1e-13)
    assert len(added) == 1


def test_hooks_of_a_layer_see_the_sum(added: list[Tensor]) -> None:
    config = replace(STYLES["llama"], num_layers=3)
    batch, seen = random_batch(config), dict[bool, list[Tensor]]()
    for compiled in (False, True):
        model = GPTModel(config, COMPILED if compiled else FP64)
        found = seen.setdefault(compiled, [])
        observed = model.decoder.layers[1]
        observed.register_forward_hook(lambda module, args, output, found=found: found.extend((args[0], output)))
        found += loss_and_gradients([model], batch).values()
    torch.testing.assert_close(seen[True], seen[False], rtol=1e-11, atol=1e-13)
