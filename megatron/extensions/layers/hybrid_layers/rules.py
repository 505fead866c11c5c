"""Configuration checks for use by several mixers. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig


def unless_shared(c: RunConfig, flag: str, value: int | None, what: str, default: int = 0) -> Iterator[Problem]:
    """Report a flag whose number cannot be divided evenly over tensor- and context-parallel ranks.

    Args:
        c: Configuration.
        flag: Name of the flag that sets the number.
        value: Value of the flag; None if the flag is not set.
        what: Description of what is shared.
        default: Number that applies if the flag is not set.
    """
    tp = c.parallel.tensor_model_parallel_size
    cp = c.parallel.context_parallel_size
    count = value or default
    if not divides(tp * cp, count):
        ranks, near = f"--tensor-model-parallel-size {tp}", multiples(count, max(tp * cp, 1))
        if cp > 1:
            ranks = f"{ranks} * --context-parallel-size {cp} = {tp * cp}"
            near = f"{near}, or lower --context-parallel-size"
        rule = f"must be a multiple of {ranks}, as these ranks share {what}"
        yield Problem(flag, value, rule if value else f"is {count} by default, and {rule}", near)


def unless_aligned(
    c: RunConfig, flag: str, value: int | None, each: int, what: str, default: int = 0, *, cut: bool = True
) -> Iterator[Problem]:
    """Report a flag that gives the matrices of a rank dimensions without the alignment that the linear format needs.

    Args:
        c: Configuration.
        flag: Name of the flag that sets the number.
        value: Value of the flag; None if the flag is not set.
        each: Number of rows or columns of the matrix for each unit of `value`, such as the channels per head.
        what: Description of the rows or columns.
        default: Number that applies if the flag is not set.
        cut: True if the number is divided over tensor-parallel ranks.
    """
    tp, count = c.parallel.tensor_model_parallel_size, value or default
    parts = tp if cut else 1
    if (name := linear_format(c.parallel)) is None or min(tp, count, each) < 1 or count % parts:
        return
    alignment, under = LINEAR_FORMATS.facts(name).alignment(c.parallel, tp)
    if (rows := count // parts * each) % alignment:
        rule = f"under {under}, a rank's {rows} {what} must be a multiple of {alignment}"
        near = multiples(count, alignment // gcd(alignment, each) * parts)
        yield Problem(flag, value, rule if value else f"is {count} by default, and {rule}", near)
