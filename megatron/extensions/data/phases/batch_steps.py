"""Parsers of --rampup-batch-size and --step-batch-size-schedule. This module does not import torch."""

from __future__ import annotations

import re
from itertools import pairwise

from megatron.training.config.batch_size import BatchSizes


def ramp(final: int, start: int, increment: int, samples: int) -> BatchSizes:
    """Return the linearly increasing batch sizes of --rampup-batch-size.

    Args:
        final: Last batch size.
        start: First batch size.
        increment: Difference between consecutive batch sizes.
        samples: Number of samples before the last batch size is reached. These samples are divided equally among the
            smaller batch sizes.
    """
    n = (final - start) // increment
    return BatchSizes(final, tuple((-(-(k + 1) * samples // n), start + k * increment) for k in range(n)))


SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """Parse a schedule such as `0:384 200B:768` into (tokens, batch size) pairs. Each batch size applies after the
    given number of consumed tokens. Spaces or commas separate the entries.

    Raises ValueError if the text is invalid, if the first entry does not begin at 0 tokens, or if the token counts do
    not increase.
    """
    steps = []
    for part in text.replace(",", " ").split():
        found = re.fullmatch(r"([0-9.]+)([KMBT]?):([0-9]+)", part)
        if found is None or float(found[1]) * SUFFIXES[found[2]] % 1:
            raise ValueError(f"{part!r} must be TOKENS:SIZE, for example 200B:768")
        steps.append((int(float(found[1]) * SUFFIXES[found[2]]), int(found[3])))
    if not steps or steps[0][0] != 0:
        raise ValueError("must begin with a batch size at 0 tokens, for example 0:384")
    if any(later <= sooner for (sooner, _), (later, _) in pairwise(steps)):
        raise ValueError("the numbers of tokens must increase")
    return steps
