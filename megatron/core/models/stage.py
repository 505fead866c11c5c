"""The contents of one pipeline stage. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Contents of one pipeline stage: its layers by global number, the embedding (first), norm and head (last), and
    with the head the modules of multi-token prediction."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True
    tied_stages: tuple[int, ...] = ()
    """The stages that each hold a copy of the embedding, if they are on different ranks."""
