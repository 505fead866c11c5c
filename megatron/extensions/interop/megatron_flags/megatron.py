"""Entry of `FOREIGN_PROGRAMS` for Megatron-LM: translation of its flags, and known differences in results. This module
does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron.extensions.interop.megatron_flags.megatron_differences import differences_met
from megatron.extensions.interop.megatron_flags.tables import ForeignFlags, read_tables
from megatron.training.config.run_config import RunConfig


class MegatronLM(ForeignFlags):
    """Translation of Megatron-LM's flags by the tables, and warnings about known differences in results."""

    def differences(self, config: RunConfig, given: Collection[str]) -> Iterable[str]:
        return differences_met(config, given)


MEGATRON = MegatronLM(**vars(read_tables()))
