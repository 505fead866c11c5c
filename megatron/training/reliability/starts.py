"""Interface of starters, which run each rank in a child of the process that the launcher started.
This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from megatron.core.registry import imported
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch

Attempt = Callable[[RunConfig, Launch], int]
"""Function that trains as a rank and returns the exit code."""


class Starter(Protocol):
    """Function that runs the attempts of a rank."""

    def __call__(self, config: RunConfig, launch: Launch, attempt: Attempt) -> int:
        """Call `attempt`, possibly several times, each in a separate process with its own rank and world.

        The launcher may have started more processes than the world has ranks. Returns the exit code of the last call.
        """


@runtime_checkable
class StartsRanks(Protocol):
    """Base class of extension flags that may launch the ranks of a run."""

    @property
    def starter(self) -> str | None:
        """Location `package.module:name` of the `Starter`, which is imported only when the ranks start. None if the
        flags select no starter."""

    @property
    def spare_ranks(self) -> int:
        """Number of spare processes. These are the last processes that the launcher starts, and they initially have no
        rank."""


def spare_ranks(config: RunConfig) -> int:
    """Return the number of launched processes that initially have no rank."""
    return sum(options.spare_ranks for options in config.extension_options if isinstance(options, StartsRanks))


def start(config: RunConfig, launch: Launch, attempt: Attempt) -> int:
    """Run the attempts of a rank: a single attempt in this process, unless an extension provides a starter. Returns the
    exit code."""
    asked = [options.starter for options in config.extension_options if isinstance(options, StartsRanks)]
    name = next((found for found in asked if found is not None), None)
    if name is None:
        return attempt(config, launch)
    starter: Starter = imported(name)
    return starter(config, launch, attempt)
