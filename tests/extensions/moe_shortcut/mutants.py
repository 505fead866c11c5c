"""Mutants of shortcut-connected and zero-computation experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.moe import router
from megatron.extensions.moe_shortcut import delayed
from tests.parity.mutants.common import mutant

OF_EXPERTS = {"mlp": "moe", "routing": "shortcut"}


@mutant(GPTModel, "hidden_states", world="2", pp="2", schedule="interleaved3", **OF_EXPERTS)
def _experts_lost_between_stages(self: Any, hidden: Tensor | None, *more: Any) -> Tensor:
    """What experts of the stage before have computed is not in a message."""
    if hidden is not None:
        h = self.config.hidden_size
        hidden = F.pad(hidden[..., :h], (0, h))
    return _true_states(self, hidden, *more)


_true_states = GPTModel.hidden_states


@mutant(delayed.DelayedExperts, "forward", world="2", tp="2sp", **OF_EXPERTS)
def _experts_at_once(self: Any, stream: Tensor, *more: Any) -> Tensor:
    """Outputs of experts are added behind their own layer."""
    x, waiting = _true_forward(self, stream, *more).chunk(2, dim=-1)
    return F.pad(x + waiting, (0, x.shape[-1]))


_true_forward = delayed.DelayedExperts.forward


@mutant(router.TopKRouter, "forward", world="2", ep="2", **OF_EXPERTS)
def _zero_experts_return_nothing(self: Any, *operands: Any) -> router.Choice:
    """Zero-computation experts return nothing in place of the token."""
    choice = _true_choice(self, *operands)
    assert choice.kept is not None
    return replace(choice, kept=choice.kept * 0)


_true_choice = router.TopKRouter.forward
