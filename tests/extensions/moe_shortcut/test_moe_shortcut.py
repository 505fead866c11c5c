"""Tests of shortcut-connected experts. The last layer must not leave an expert output pending. The tests also cover
text generation. The tests in tests/extensions/hugging_face compare LongCat-Flash with transformers."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.stage_parameters import count_parameters
from megatron.extensions.moe.moe_shortcut.flags import ShortcutFlags
from tests.gpt_cases import FP64, logits_in_parts, random_batch
from tests.moe_cases import DEEPSEEK

DELAYED = DEEPSEEK.with_options(ShortcutFlags(moe_shortcut=True))


def test_one_layer_equals_the_plain_layer() -> None:
    """With one layer, logits and gradients equal those without the shortcut, because no later layer adds the experts'
    output."""
    found = []
    for config in (DEEPSEEK, DELAYED):
        model = GPTModel(replace(config, num_layers=1), FP64).train()
        loss = model(None, random_batch(config))
        found.append([loss, *torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)
    assert count_parameters(DELAYED) == count_parameters(DEEPSEEK)


def test_generation() -> None:
    model, tokens = GPTModel(DELAYED, FP64).eval(), random_batch(DELAYED).tokens
    found, _ = logits_in_parts(model, tokens, (1, 6, 9))
    torch.testing.assert_close(found, model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
