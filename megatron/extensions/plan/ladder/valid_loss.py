"""Read the validation loss from a record in metrics.jsonl. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NOT_FINITE = ("NaN", "Infinity", "-Infinity")


def valid_loss(record: Mapping[str, Any]) -> float | None:
    """Return the validation loss of a record; None if the record has none. Nonfinite losses, which are stored as text,
    are converted to numbers."""
    value = record.get("valid_loss")
    return float(value) if value in NOT_FINITE or isinstance(value, float) else None
