"""Register the flag that compares a run with a ladder's prediction. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("expected loss", may_change=True, rules=f"{__package__}.rules:problems")
@dataclass(frozen=True)
class ExpectFlags:
    """Settings that compare a run with the prediction of a ladder."""

    expect: str | None = flag(None, path="local")
    """Folder of a ladder (tools/ladder.py) that predicts this run, or the ladder.json file in this folder. Each
    validation loss is logged with its distance from the predicted curve, and a loss outside the predicted band causes a
    warning."""


CALLBACKS.register(
    "expected loss",
    f"{__package__}.expected:ExpectedLoss",
    when=lambda config: config.options(ExpectFlags).expect is not None,
)
