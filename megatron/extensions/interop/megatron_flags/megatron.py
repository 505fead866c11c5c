"""Megatron-LM as another program: its flags and what differs from its results. This module does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron.extensions.interop.megatron_flags.megatron_differences import differences_met
from megatron.extensions.interop.megatron_flags.tables import ForeignFlags, read_tables
from megatron.training.config.run_config import RunConfig


class MegatronLM(ForeignFlags):
    """The flags of the tables, and the known differences."""

    def differences(self, config: RunConfig, given: Collection[str]) -> Iterable[str]:
        return differences_met(config, given)


MEGATRON = MegatronLM(**vars(read_tables()))
