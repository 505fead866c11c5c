"""Is the parity matrix able to fail? Each reduction is broken on purpose, and the matrix must go red.

A mutant replaces functions of the product for one comparison; the one-process reference is computed before, from the
product as it is. Beside each stands a combination of the matrix that exercises what is broken. The modules of this
folder have them by subject.

    python -m tests.parity.mutants            every mutant against its combination: what was seen, a line each
    python -m tests.parity.mutants --matrix   every mutant against the matrix until something is red
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest import mock

from megatron.extensions import BUILT_IN
from tests.parity.matrix import difference, reference
from tests.parity.matrix.combination import Combination
from tests.parity.mutants import (  # noqa: F401 (they add mutants)
    attention,
    data_parallel,
    experts,
    layers,
    offload,
    optimizer,
    pipeline,
    tensor_parallel,
)
from tests.parity.mutants.common import MUTANTS, Patch

EXTENSIONS = Path(__file__).parents[2] / "extensions"

for extension in BUILT_IN:
    if (EXTENSIONS / extension.name / "mutants.py").exists():
        import_module(f"tests.extensions.{extension.name}.mutants")

STALE = ("TypeError", "AttributeError", "NameError", "ImportError")
"""Errors of a mutant that no longer fits what it replaces, not of the product."""


@contextmanager
def planted(patches: Sequence[Patch]) -> Iterator[None]:
    """The product with a mutant in it."""
    from megatron.training import forward_backward as step

    running = []
    try:
        for target, name, broken in patches:
            patcher = mock.patch.object(step if target == "step" else target, name, broken)
            patcher.start()
            running.append(patcher)
        yield
    finally:
        for patcher in running:
            patcher.stop()


def seen(name: str, combination: Combination) -> str | None:
    """What the matrix says of a combination with the mutant planted; None if it notices nothing."""
    reference(combination.alone)
    with planted(MUTANTS[name][0]):
        try:
            return difference(combination)
        except (RuntimeError, TimeoutError) as error:
            said = str(error).strip().splitlines()[-1]
            if said.startswith(STALE):
                raise
            return f"{type(error).__name__}: {said[:160]}"
