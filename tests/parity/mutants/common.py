"""What mutants of several subjects share."""

from __future__ import annotations

from typing import Any

from tests.parity.matrix.combination import Combination

Patch = tuple[Any, str, Any]
"""What to replace of which object, and by what."""

Mutants = dict[str, tuple[list[Patch], Combination]]
"""By name: the patches, and a combination that exercises what is broken."""


def nothing(*args: Any, **kwargs: Any) -> None:
    """In place of a reduction: it does not happen."""
