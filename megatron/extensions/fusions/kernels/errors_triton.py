"""What Triton cannot do, told as torch tells it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from triton.errors import TritonError


@contextmanager
def as_runtime_errors(subject: str) -> Iterator[None]:
    """What Triton cannot compile or launch is a RuntimeError, as of torch's kernels for shapes that they have not. For
    kernels that another one can replace."""
    try:
        yield
    except TritonError as error:
        raise RuntimeError(f"{subject}: {error}") from error
