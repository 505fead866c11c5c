"""Parsers of --rampup-batch-size and --step-batch-size-schedule. This module does not import torch."""

from __future__ import annotations

import re
from itertools import pairwise

from megatron.training.config.batch_size import BatchSizes


def ramp(final: int, start: int, increment: int, samples: int) -> BatchSizes:
    """Batch sizes from `start` to `final` in steps of `increment`, for equal shares of `samples`."""
    n = (final - start) // increment
    return BatchSizes(final, tuple((-(-(k + 1) * samples // n), start + k * increment) for k in range(n)))


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """Parse `0:384 200B:768`, separated by spaces or commas, into (consumed tokens from which the size holds, batch
    size).

    Raises ValueError if the text cannot be read, does not begin at 0, or if the tokens do not increase.
    """
    steps = []
    for part in text.replace(",", " ").split():
        found = re.fullmatch(r"([0-9.]+)([KMBT]?):([0-9]+)", part)
        if found is None or float(found[1]) * SUFFIXES[found[2]] % 1:
            raise ValueError(f"{part!r} must be TOKENS:SIZE, for example 200B:768")
        steps.append((int(float(found[1]) * SUFFIXES[found[2]]), int(found[3])))
    if not steps or steps[0][0] != 0:
        raise ValueError("must begin with the batch size from 0 tokens on, for example 0:384")
    if any(later <= sooner for (sooner, _), (later, _) in pairwise(steps)):
        raise ValueError("the numbers of tokens must rise")
    return steps
