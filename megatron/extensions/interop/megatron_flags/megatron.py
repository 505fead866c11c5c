"""Entry of `FOREIGN_PROGRAMS` that translates Megatron-LM's flags and reports known differences in results. This module
does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from megatron.extensions.interop.megatron_flags.megatron_differences import differences_met
from megatron.extensions.interop.megatron_flags.tables import ForeignFlags, read_tables
from megatron.training.config.run_config import RunConfig


class MegatronLM(ForeignFlags):
    """Translator of Megatron-LM's flags. The translator also warns about known differences between the results of
    Megatron-LM and of this program."""

    def differences(self, config: RunConfig, given: Collection[str]) -> Iterable[str]:
        return differences_met(config, given)


MEGATRON = MegatronLM(**vars(read_tables()))
