"""Flags for rollbacks. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import Condition, flag
from megatron.extensions.operate.peer_copies.flags import PeerCopyConfig
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags

SWITCH = "--rollback-on-spike"
CHECKS = Condition("--check-for-spiky-loss or --check-for-large-grads; add one of them")


@extension_flags("rollbacks", may_change=True)
@dataclass(frozen=True)
class RollbackFlags:
    """Flags for rollbacks after loss spikes."""

    rollback_on_spike: bool = flag(False, needs=CHECKS)
    """At a spike, return to an earlier state and skip the batches since this state. States are kept in host memory. A
    missing state is recomputed from an older checkpoint."""

    rollback_steps: int = flag(10, at_least=1, no_effect_without=SWITCH)
    """--rollback-on-spike: minimum number of steps to go back. The run may go back up to twice as many steps if states
    are kept at intervals. With 1, only the step with the spike is undone."""

    rollback_batches: int | None = flag(None, at_least=1, no_effect_without=SWITCH)
    """--rollback-on-spike: number of batches to skip, of which the last is the batch of the spike. If the run goes back
    fewer steps than this number, batches after the spike are also skipped. Default: all batches from the earlier state
    to the spike."""

    max_rollbacks: int = flag(10, at_least=1, no_effect_without=SWITCH)
    """--rollback-on-spike: maximum number of rollbacks in the whole run. The spike after the last
    permitted rollback ends the run."""

    def plan_section(self, config: RunConfig) -> tuple[str, str] | None:
        """Return the title of the plan section about rollbacks, and the entry point of the function that yields the
        lines of this section. Return None if the plan has no such section."""
        if not rolls_back(config) or uses_peer_copies(config):
            return None
        return "Rollback at a spike", f"{__package__}.plan_lines:lines"


def rolls_back(config: RunConfig) -> bool:
    """Return True if a run rolls back at a spike."""
    return config.options(RollbackFlags).rollback_on_spike and not config.training.skip_train


def uses_peer_copies(config: RunConfig) -> bool:
    """Return True if the last two copies of --peer-copies always include the state that a rollback needs."""
    copies = config.options(PeerCopyConfig)
    return copies.peer_copies > 0 and config.options(RollbackFlags).rollback_steps <= copies.peer_copy_interval + 1


def interval_of(config: RunConfig) -> int:
    """Return the number of steps between two states that are kept for rollbacks. With this interval, a rollback never
    needs more than the last two states."""
    if uses_peer_copies(config):
        return config.options(PeerCopyConfig).peer_copy_interval
    return max(1, config.options(RollbackFlags).rollback_steps - 1)


CALLBACKS.register("rollback", f"{__package__}.hooks:Rollback", when=rolls_back)
