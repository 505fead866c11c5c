"""Flags for restarts within the launcher's processes. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("restarts", may_change=True)
@dataclass(frozen=True)
class RestartConfig:
    restarts_in_job: int = flag(0, at_least=0)
    """Maximum number of consecutive restarts of failed ranks, within the launcher's processes, that complete no step.
    The next failure is reported to the launcher. Set to 0 to report every failure."""

    spare_ranks: int = flag(0, at_least=0, no_effect_without="--restarts-in-job above 0")
    """Number of spare processes, which have no rank at first. Spare processes wait with all modules imported, and
    replace ranks whose processes or hosts are lost. The launcher starts the spare processes last."""

    @property
    def starter(self) -> str | None:
        """Entry point that forks the ranks and restarts them after a failure; None if --restarts-in-job is 0."""
        return f"{__package__}.restarts:start_again" if self.restarts_in_job else None


def restarts(config: RunConfig) -> bool:
    """Return True if a run restarts failed ranks within the launcher's processes (--restarts-in-job)."""
    return config.options(RestartConfig).restarts_in_job > 0


CALLBACKS.register("progress for the parent", f"{__package__}.restarts:ReportsProgress", when=restarts)
