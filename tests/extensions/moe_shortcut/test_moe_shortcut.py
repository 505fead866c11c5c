"""Shortcut-connected experts: generation. LongCat-Flash is compared with transformers among the families of Hugging
Face."""

from __future__ import annotations

import torch

from megatron.core.batch import Batch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.extensions.moe_shortcut.flags import ShortcutFlags
from tests.gpt_cases import FP64, logits_in_parts, random_batch
from tests.moe_cases import DEEPSEEK

DELAYED = DEEPSEEK.with_options(ShortcutFlags(moe_shortcut=True))


def test_generation() -> None:
    model, tokens = GPTModel(DELAYED, FP64).eval(), random_batch(DELAYED).tokens
    found, _ = logits_in_parts(model, tokens, (1, 6, 9))
    torch.testing.assert_close(found, model.logits(None, Batch.of_tokens(tokens)), rtol=1e-12, atol=1e-12)
