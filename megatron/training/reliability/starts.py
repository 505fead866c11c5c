"""Starters, which run each rank in a child of the process that the launcher started.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from megatron.core.registry import imported
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch

Attempt = Callable[[RunConfig, Launch], int]
"""Trains as a rank, and returns the exit code."""


class Starter(Protocol):
    """Makes the attempts of a rank."""

    def __call__(self, config: RunConfig, launch: Launch, attempt: Attempt) -> int:
        """Calls `attempt`, perhaps several times, each in a process of its own, and with a rank and a world of its own:
        the processes that the launcher has started may be more. Returns the exit code of the last."""


@runtime_checkable
class StartsRanks(Protocol):
    """Flags of an extension that may start the ranks of a run."""

    @property
    def starter(self) -> str | None:
        """`package.module:name` of the `Starter`, imported when it starts; None if the flags do not ask for one."""

    @property
    def spare_ranks(self) -> int:
        """Processes of the launcher, the last ones, that have no rank at first."""


def spare_ranks(config: RunConfig) -> int:
    """Processes of the launcher that have no rank at first."""
    return sum(options.spare_ranks for options in config.extension_options if isinstance(options, StartsRanks))


def start(config: RunConfig, launch: Launch, attempt: Attempt) -> int:
    """Makes the attempts of a rank: one, in this process, unless an extension makes them. Returns the exit code."""
    asked = [options.starter for options in config.extension_options if isinstance(options, StartsRanks)]
    name = next((found for found in asked if found is not None), None)
    if name is None:
        return attempt(config, launch)
    starter: Starter = imported(name)
    return starter(config, launch, attempt)
