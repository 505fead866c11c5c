"""Configuration checks that the rules of several mixers use. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from megatron.core.tensor_parallel.linear_formats import LINEAR_FORMATS, linear_format
from megatron.training.config.problem import Problem, divides, multiples
from megatron.training.config.run_config import RunConfig


def unless_shared(c: RunConfig, flag: str, value: int | None, what: str, default: int = 0) -> Iterator[Problem]:
    """Report a problem if the value of a flag cannot be divided evenly over the tensor- and context-parallel ranks.

    Args:
        c: Configuration.
        flag: Name of the flag.
        value: Value of the flag; None if the flag is not set.
        what: Text for the error message that says what the ranks share, such as "the heads of lightning attention".
        default: Value that applies if the flag is not set.
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
    """Report a problem if the value of a flag results in a matrix dimension that the linear format does not support. On
    each rank, the dimension must be a multiple of the size that the format requires.

    Args:
        c: Configuration.
        flag: Name of the flag.
        value: Value of the flag; None if the flag is not set.
        each: Number of rows or columns of a matrix per unit of `value`. If `value` is a number of heads, this is the
            number of channels per head.
        what: Text for the error message that names the rows or columns, such as "channels of Mamba-1".
        default: Value that applies if the flag is not set.
        cut: Whether the rows or columns are divided over tensor-parallel ranks.
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
