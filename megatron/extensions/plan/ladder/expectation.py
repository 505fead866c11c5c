"""Read the prediction of a ladder: a validation loss curve with an uncertainty band.

This module does not import torch.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
PREDICTION = "ladder.json"


@dataclass(frozen=True)
class Expected:
    """Predicted loss, with the bounds of the uncertainty band."""

    tokens: float
    loss: float
    low: float
    high: float

    def between(self, later: Expected, tokens: float) -> Expected:
        """Interpolate between this prediction and a later one, linearly in the logarithm of the token count."""
        share = math.log(tokens / self.tokens) / math.log(later.tokens / self.tokens)
        values = ((getattr(self, name), getattr(later, name)) for name in ("loss", "low", "high"))
        return Expected(tokens, *(one + share * (two - one) for one, two in values))


@dataclass(frozen=True)
class Expectation:
    """Predicted loss curve of a run."""

    hidden_size: int
    num_layers: int
    parameters: int
    tokens: int
    batch_size: int | None
    """Number of samples in a batch; None if the file does not state it."""

    rate: float | None
    """Learning rate; None if the file does not state it."""

    curve: Sequence[Expected]

    def at(self, tokens: float) -> Expected | None:
        """Return the prediction at a token count; None if the count lies before the first or after the last predicted
        point."""
        place = bisect_left([point.tokens for point in self.curve], tokens * (1 - 1e-9))
        if place == len(self.curve) or (place == 0 and tokens < self.curve[0].tokens * (1 - 1e-9)):
            return None
        point = self.curve[place]
        return point if math.isclose(point.tokens, tokens) else self.curve[place - 1].between(point, tokens)


def read_expectation(path: str | Path) -> Expectation:
    """Read a ladder.json file, given its path or the path of its folder. Raises ValueError if the file contains no
    ladder prediction, and OSError if it does not exist."""
    file = Path(path) / PREDICTION if Path(path).is_dir() else Path(path)
    try:
        found: Any = json.loads(file.read_text(encoding="utf-8"))
        target = found["target"]
        curve = [
            Expected(*(float(point[name]) for name in ("tokens", "loss", "low", "high"))) for point in found["curve"]
        ]
        if found["schema"] != SCHEMA or not curve or not all(point.tokens > 0 for point in curve):
            raise ValueError
        hidden_size, num_layers = int(target["hidden_size"]), int(target["num_layers"])
        parameters, tokens = int(target["parameters"]), int(target["tokens"])
        batch, rate = target.get("batch_size"), target.get("lr")
        return Expectation(hidden_size, num_layers, parameters, tokens, batch, rate, curve)
    except (ValueError, LookupError, TypeError):
        raise ValueError("contains no ladder prediction") from None
