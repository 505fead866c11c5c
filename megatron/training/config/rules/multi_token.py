"""Rules of multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parts import LOSSES
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

DEPTHS = "--mtp-num-layers"


def multi_token(c: RunConfig, world_size: int) -> Iterator[Problem]:
    m, depths, s = c.model, c.model.mtp_depths, c.model.seq_length
    if depths < 1:
        return
    if 0 < s <= depths:
        rule = f"must be below --seq-length {s}: beyond it no token of a sample has a label at the last depth"
        yield Problem(DEPTHS, depths, rule, f"nearest: {s - 1}" if s > 1 else "remove it")
    if m.loss_func in LOSSES and not LOSSES.facts(m.loss_func).multi_token:
        rule = f"needs a loss that takes labels of later tokens, and --loss-func {m.loss_func} is not known to"
        remedy = f"remove {DEPTHS}, or register the loss with multi_token=True if logits and label are all it needs"
        yield Problem(DEPTHS, depths, rule, remedy)
