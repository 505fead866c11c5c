"""Rule for a member of a group of equals, such as a layer among layers, that grows while the others do not. No torch.

The members have a value each record. A straight line is fitted to the logarithms of a member's last `WINDOW` values.
What counts is how steep it is beside the median of the group, so growth that all share, as in warm-up, is none. A
member is out of line if, in two records one after the other, its line rises by more than the logarithm of the
threshold beside that median, and

- `OWN` times as steeply as four in five of its own lines in the `HISTORY` windows that ended before this one began:
  what it does all the time is noise;
- `OTHERS` times as steeply as any other member's line now.

The numbers were chosen on small models in training from their initial weights on, for no alarm in them.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

WINDOW = 10
HISTORY = 60
OWN, OTHERS, QUANTILE = 3.0, 2.0, 0.8

Member = TypeVar("Member", bound=Hashable)


@dataclass(frozen=True)
class Growth:
    """By which factor the fitted line of a member rises over a window, against the median of its group."""

    factor: float
    others: float
    """That of the other member that changes most, in either direction."""


@dataclass
class _Track:
    """The logarithms of a member's last values, and the slopes of the windows that end in them, less the group's."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slopes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + HISTORY))
    above: int = 0
    """Records in a row that were out of line."""

    told: bool = False
    """Whether that was said, and the line still rises by more than the threshold."""

    @property
    def earlier(self) -> list[float]:
        """How steep the windows were that share no record with the present one, in order of size."""
        return sorted(map(abs, list(self.slopes)[:-WINDOW]))


def _itself(member: Any) -> Any:
    return member


class GrowthRule(Generic[Member]):
    """The rule for one group. Nothing is said of a member before it has `warm_up` earlier windows. Members of one
    `family` are not compared: where one of two grows against the other, the other shrinks."""

    def __init__(self, threshold: float, warm_up: int, family: Callable[[Member], Any] = _itself) -> None:
        self.least, self.warm_up, self.family = math.log(threshold), warm_up, family
        self._tracks: dict[Member, _Track] = {}

    def add(self, values: Mapping[Member, float]) -> dict[Member, Growth]:
        """Takes the values of a record. Returns the members that are out of line since this record. A value that is
        not above 0, or not finite, makes the member begin again."""
        fit = {name: math.log(value) for name, value in values.items() if value > 0 and math.isfinite(value)}
        for name in self._tracks.keys() - fit.keys():
            del self._tracks[name]
        for name, value in fit.items():
            self._tracks.setdefault(name, _Track()).values.append(value)
        steep = {name: _slope(t.values) for name, t in self._tracks.items() if len(t.values) == WINDOW}
        middle = statistics.median(steep.values()) if steep else 0.0
        for name, slope in steep.items():
            self._tracks[name].slopes.append(slope - middle)
        return {name: found for name, track in self._tracks.items() if (found := self._judge(name, track)) is not None}

    def _judge(self, name: Member, track: _Track) -> Growth | None:
        if not track.slopes or track.slopes[-1] * WINDOW <= self.least:
            track.above, track.told = 0, False
            return None
        earlier, slope, family = track.earlier, track.slopes[-1], self.family(name)
        rivals = (abs(t.slopes[-1]) for n, t in self._tracks.items() if t.slopes and self.family(n) != family)
        rival = max(rivals, default=0.0)
        known = len(earlier) >= self.warm_up
        above = known and slope > OWN * earlier[int(QUANTILE * (len(earlier) - 1))] and slope > OTHERS * rival
        track.above = track.above + 1 if above else 0
        if track.told or track.above < 2:
            return None
        track.told = True
        return Growth(math.exp(slope * WINDOW), math.exp(rival * WINDOW))


def _slope(values: deque[float]) -> float:
    """Of the straight line with the least squares through values one record apart."""
    middle = (len(values) - 1) / 2
    return sum((x - middle) * y for x, y in enumerate(values)) / sum((x - middle) ** 2 for x in range(len(values)))
