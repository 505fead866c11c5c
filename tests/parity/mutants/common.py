"""How mutants are added, and what those of several subjects share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tests.parity.matrix.combination import Combination

F = TypeVar("F", bound=Callable[..., Any])
Patch = tuple[Any, str, Any]
"""What to replace of which object, and by what."""

MUTANTS: dict[str, tuple[list[Patch], Combination]] = {}
"""By name: the patches, and a combination that exercises what is broken."""


def plant(name: str, *patches: Patch, **choices: str) -> None:
    """Adds a mutant that is exercised by a combination of these choices."""
    MUTANTS[name] = list(patches), Combination.of(**choices)


def mutant(target: Any, attribute: str, **choices: str) -> Callable[[F], F]:
    """Adds the function below, which takes the place of `target.attribute`. Its docstring begins with the name."""

    def added(function: F) -> F:
        assert function.__doc__ is not None
        plant(function.__doc__.partition(".\n")[0].removesuffix("."), (target, attribute, function), **choices)
        return function

    return added


def nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a reduction: it does not happen."""
