"""Element-wise regions between matrix products, run as they are or compiled into one kernel each.

A region is a pure function of tensors. What lies between regions, matrix products, attention and collectives, has
kernels of its own that a compiler would call as well; cutting there leaves hooks, queues of weight gradients and the
order of collectives as they are written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

Region = TypeVar("Region", bound=Callable[..., Any])


def region(function: Region, compiled: bool) -> Region:
    """`function`, or its compiled twin: compiled once a process, when it first runs, and again for new shapes."""
    return _compiled(function) if compiled else function


@cache
def _compiled(function: Region) -> Region:
    return torch.compile(function)  # type: ignore[return-value]
