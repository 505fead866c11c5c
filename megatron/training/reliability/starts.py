"""Interface of starters. A starter runs each rank in a child process. The parent is the process that the launcher
started. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from megatron.core.registry import imported
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.launch import Launch

Attempt = Callable[[RunConfig, Launch], int]
"""Function that runs one rank of the training and returns the exit code."""


class Starter(Protocol):
    """Function that trains on one rank. The function may start the rank several times, for example again after a
    failure."""

    def __call__(self, config: RunConfig, launch: Launch, attempt: Attempt) -> int:
        """Call `attempt` once or several times. Each call runs in a separate process, which has its own rank and world.

        The launcher may also have started spare processes, so there may be more processes than ranks. Return the exit
        code of the last attempt.
        """


@runtime_checkable
class StartsRanks(Protocol):
    """Base class of extension flags that may select a starter, which launches the ranks of a run."""

    @property
    def starter(self) -> str | None:
        """Location of the selected `Starter`, as `package.module:name`, or None if the flags select no starter. The
        module is imported only when the ranks are launched."""

    @property
    def spare_ranks(self) -> int:
        """Number of spare processes. The launcher starts the spare processes last, and they have no rank at first."""


def spare_ranks(config: RunConfig) -> int:
    """Return the number of spare processes, which have no rank when they are launched."""
    return sum(options.spare_ranks for options in config.extension_options if isinstance(options, StartsRanks))


def start(config: RunConfig, launch: Launch, attempt: Attempt) -> int:
    """Run a rank, and return the exit code. By default, the rank runs once, in this process. An extension may provide a
    starter that runs the rank several times."""
    asked = [options.starter for options in config.extension_options if isinstance(options, StartsRanks)]
    name = next((found for found in asked if found is not None), None)
    if name is None:
        return attempt(config, launch)
    starter: Starter = imported(name)
    return starter(config, launch, attempt)
