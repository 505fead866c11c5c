"""How a run ends, as its exit code says it. No torch."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The code with which every process of a run ends. Under torchrun these are the codes of its workers."""

    DONE = 0
    """Trained to the end, or as far as --exit-interval, --exit-duration-in-mins or an `exit` file asked."""

    FAILED = 1
    """A rank failed; the report names it."""

    BAD_CONFIGURATION = 2
    """A flag, or a file that one names, has to be corrected first: starting again does not help."""

    TO_BE_RESUMED = 75
    """Ended by a signal or the end of the SLURM job, after saving: the same command goes on."""

    KILLED = 128
    """Plus the number of a second signal, which ended the process at once."""
