"""Registry of what starts the ranks of a run in processes of their own, within those of the launcher. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron.core.registry import Registry
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch

Attempt = Callable[[], int]
"""Trains, and returns the exit code."""


class Starter(Protocol):
    """Makes the attempts of a rank."""

    def __call__(self, config: RunConfig, launch: Launch, attempt: Attempt) -> int:
        """Calls `attempt`, perhaps several times, each in a process of its own. Returns the exit code of the last."""


@dataclass(frozen=True)
class StarterFacts:
    """Facts about a starter."""

    when: Callable[[RunConfig], bool]
    """True if a run has it."""


STARTERS = Registry("starter", StarterFacts, protocol=Starter)
"""What `pretrain_gpt.py` starts a rank by; a run has at most one."""


def start(config: RunConfig, launch: Launch, attempt: Attempt) -> int:
    """Makes the attempts of a rank: one, in this process, unless an extension makes them. Returns the exit code."""
    for name in STARTERS.wanted(config):
        code: int = STARTERS[name](config, launch, attempt)
        return code
    return attempt()
