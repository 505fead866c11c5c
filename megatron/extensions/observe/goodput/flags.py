"""Flags of goodput. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("goodput", may_change=True)
@dataclass(frozen=True)
class GoodputConfig:
    log_goodput: bool = False
    """Log goodput, which is the fraction of the wall time since the first start of the run that was spent on useful
    steps. The other parts of the wall time are also logged."""


def _when(config: RunConfig) -> bool:
    return config.options(GoodputConfig).log_goodput and not config.training.skip_train


CALLBACKS.register("goodput", f"{__package__}.hooks:Goodput", when=_when)
