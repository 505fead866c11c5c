"""Detection of layers and tensor-parallel ranks whose statistics are outliers. This module does not import torch.

Each numeric layer statistic is compared between layers. The weight norms of parameters that have the same name in every
layer, such as `mlp.linear_fc1.weight`, are also compared between layers. The weight and gradient norms of a parameter's
shards are compared between tensor-parallel ranks. In addition, replicas of a parameter must have equal norms. Equal
norms of different shards indicate that the ranks use the same seed, an error that the loss does not show.

The same rule applies to every group of members, such as the layers: it detects a member that grows while the other
members do not. Each record has one value per member. For each member, a straight line is fitted to the logarithms of
its last `WINDOW` values. The median slope of the group is subtracted from each slope, so that growth of all members, as
in warm-up, does not count. A member is an outlier if the following conditions hold in two consecutive records:

- Over the window, the fitted line of the member, minus the median slope, rises by more than the logarithm of
  --layer-growth-threshold.
- The line is more than `OWN` times as steep as 80% of the earlier lines of the same member, so steady growth is not
  reported. The earlier lines were fitted to the last `HISTORY` windows that do not overlap the current window.
- The line is more than `OTHERS` times as steep as the current line of any other member.

The constants were chosen so that training small models from scratch raises no alarm.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

OUTPUT, GAIN = "output_rms", "output_gain"
"""Statistics of a layer's output: its root mean square, and the ratio to the root mean square of the previous layer's
output."""


class Parameter(NamedTuple):
    """Properties of a parameter that are needed to interpret its norms."""

    layer: int | None
    """Index of the parameter's layer in the model; None if the parameter does not belong to a layer."""

    expert: bool
    sharded: bool
    """True if the parameter is sharded over tensor-parallel ranks, False if it is replicated."""

    init: str
    """Kind of initialization, such as `normal` or `zeros`: the `kind` field of the parameter's `Init`."""

    @property
    def random(self) -> bool:
        """True if the initial values of the parameter are random."""
        return self.init in ("normal", "uniform", "log_of_uniform")


@dataclass
class LayerRecord:
    """Logged statistics of one iteration.

    `layers` maps a statistic and a layer number to a value. `parameters` maps a parameter name and a quantity, such as
    `grad_norm`, to an L2 norm. `shards` maps a parameter name and a quantity to a list of L2 norms: one for the shard
    or replica on each tensor-parallel rank.
    """

    iteration: int
    layers: dict[str, dict[int, Any]] = field(default_factory=dict)
    parameters: dict[str, dict[str, float]] = field(default_factory=dict)
    shards: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    facts: dict[str, Parameter] = field(default_factory=dict)
    """Maps the name of each parameter to the properties of the parameter. These properties are not logged."""

    def add_layer(self, statistic: str, number: int, value: float | list[float]) -> None:
        self.layers.setdefault(statistic, {})[number] = value

    def add_parameter(self, name: str, parameter: Parameter, quantity: str, squares: Sequence[float]) -> None:
        """Add a norm of a parameter to this record.

        Args:
            name: Name of the parameter.
            parameter: Properties of the parameter.
            quantity: Measured quantity, such as the gradient norm.
            squares: Sum of squares on each tensor-parallel rank. For expert parameters, each entry is a sum over the
                expert shards on all ranks that have the same tensor-parallel rank.
        """
        copies = not (parameter.expert or parameter.sharded)
        total = squares[0] if copies else sum(squares)
        self.facts[name] = parameter
        self.parameters.setdefault(name, {})[quantity] = total**0.5
        if len(squares) > 1 and not parameter.expert:
            self.shards.setdefault(name, {})[quantity] = [square**0.5 for square in squares]
        if parameter.layer is not None:
            of_layer = self.layers.setdefault(quantity, {})
            of_layer[parameter.layer] = (of_layer.get(parameter.layer, 0.0) ** 2 + total) ** 0.5

    def add_gains(self) -> None:
        """Add the output gain of each layer: the output RMS of the layer divided by the output RMS of the previous
        layer."""
        outputs = self.layers.get(OUTPUT, {})
        for number, value in outputs.items():
            if before := outputs.get(number - 1):
                self.add_layer(GAIN, number, value / before)

    def as_json(self) -> dict[str, object]:
        """Return the record as it is written to metrics.jsonl. Each layer statistic is a list with one entry for each
        layer number in the list `layer`; null marks a missing value."""
        numbers = sorted({number for values in self.layers.values() for number in values})
        rows = {name: [values.get(number) for number in numbers] for name, values in sorted(self.layers.items())}
        found: dict[str, object] = {"iteration": self.iteration, "layers": {"layer": numbers} | rows}
        found["parameters"] = self.parameters
        return found | ({"tensor_parallel_shards": self.shards} if self.shards else {})


WINDOW = 10
HISTORY = 60
OWN = 3.0
OTHERS = 2.0
QUANTILE = 0.8

Member = TypeVar("Member", bound=Hashable)


@dataclass(frozen=True)
class Growth:
    """Growth of an outlier (a layer or a tensor-parallel rank): the factor by which its fitted line rises over a
    window, relative to the median of its group."""

    factor: float
    others: float
    """Largest factor by which any other member of the group grows or shrinks over the same window."""


@dataclass
class _Track:
    """History of a group member: the logarithms of its last values, and the slopes of its last windows minus the median
    slope of the group."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    slopes: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW + HISTORY))
    above: int = 0
    """Number of consecutive records, including the latest record, in which the member met the conditions for an
    outlier."""

    told: bool = False
    """True if the member was reported as an outlier and its growth has stayed above the threshold since that report, so
    that it is not reported again."""

    @property
    def earlier(self) -> list[float]:
        """Return the absolute slopes of all earlier windows that do not overlap the current window, in ascending
        order."""
        return sorted(map(abs, list(self.slopes)[:-WINDOW]))


class GrowthRule(Generic[Member]):
    """Rule that finds outliers in one group of members, such as the layers of a model.

    A member is reported only if it has at least `warm_up` earlier windows. Members for which `family` returns the same
    value, such as the shards of one parameter, are not compared with each other. The values of these members are
    relative to each other, so growth of one member makes the others appear to shrink.
    """

    def __init__(
        self, threshold: float, warm_up: int, family: Callable[[Member], object] = lambda member: member
    ) -> None:
        self.least = math.log(threshold)
        self.warm_up = warm_up
        self.family = family
        self._tracks: dict[Member, _Track] = {}

    def add(self, values: Mapping[Member, float]) -> dict[Member, Growth]:
        """Add a record, which contains one value per member. Return the growth of each member that becomes an outlier
        with this record.

        If the value of a member is not positive or not finite, the history of the member is discarded.
        """
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
        earlier = track.earlier
        slope = track.slopes[-1]
        family = self.family(name)
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
    """Return the slope of the least-squares line through the values of consecutive records."""
    middle = (len(values) - 1) / 2
    return sum((x - middle) * y for x, y in enumerate(values)) / sum((x - middle) ** 2 for x in range(len(values)))


SMOOTH, NOISY = 10, 40
"""Minimum number of earlier windows that the outlier rule requires before it reports a member. SMOOTH applies to weight
norms, which change little in a step. NOISY applies to statistics that depend on the samples of a step."""

FEWEST = 3
"""Smallest number of layers that can be compared."""

OF_RANKS = ("weight_norm", "grad_norm", "output_norm")

EQUAL = 1e-12
"""Maximum relative difference between the norms of two shards of a parameter at which the shards are considered copies.
In contrast, the norms of two shards with n independent random elements each differ by about 1 / sqrt(2 n).
"""

ROUNDING = 1e-6
"""Maximum relative difference between the norms of replicas that is attributed to rounding."""


class LayerAlarms:
    """Detector of outlier layers, parameters and tensor-parallel ranks in one run. Records must be passed to `judge` in
    order of iteration. A resumed run starts without earlier records."""

    def __init__(self, threshold: float) -> None:
        """Create the alarms. `threshold` is the value of --layer-growth-threshold. The value 0 disables all alarms."""
        self.threshold = threshold
        self._layers: dict[str, GrowthRule[int]] = {}
        self._ranks: dict[str, GrowthRule[tuple[str, int]]] = {}
        self._told: set[str] = set()

    def judge(self, record: LayerRecord) -> list[str]:
        """Return one message for each layer, parameter and tensor-parallel rank that becomes an outlier with this
        record."""
        if not self.threshold:
            return []
        lines = [*self._of_layers(record), *self._of_parts(record), *self._of_ranks(record)]
        return [f"iteration {record.iteration}: {line}" for line in lines]

    def _of_layers(self, record: LayerRecord) -> Iterator[str]:
        found: defaultdict[int, dict[str, Growth]] = defaultdict(dict)
        for name, values in _by_layer(record).items():
            if len(values) >= FEWEST:
                rule = self._layers.setdefault(name, GrowthRule(self.threshold, _warm_up(name)))
                for layer, growth in rule.add(values).items():
                    found[layer][name] = growth
        for layer, grown in sorted(found.items()):
            first, *more = sorted(grown, key=lambda name: -grown[name].factor)
            line = f"layer {layer} is out of line: its {first} grew by {_factor(grown[first].factor)} over {WINDOW}"
            line += " records relative to the median layer, "
            line += f"and in no other layer by more than {_factor(grown[first].others)}"
            yield line + "".join(f"; its {name} by {_factor(grown[name].factor)}" for name in more)

    def _of_parts(self, record: LayerRecord) -> Iterator[str]:
        """Yield a message for each parameter whose replicas have different norms on tensor-parallel ranks, or whose
        shards have equal norms. Each parameter is reported at most once in a run."""
        for name, norms in record.shards.items():
            facts, weights = record.facts[name], norms["weight_norm"]
            line = None
            if not facts.sharded and max(weights) - min(weights) > ROUNDING * max(weights):
                shown = ", ".join(f"{norm:.9g}" for norm in weights)
                line = (
                    f"{name} should be equal on all tensor-parallel ranks, but is not: its norms are {shown}. Ranks "
                    "have diverged; --check-replicas names the parameter"
                )
            elif facts.sharded and facts.random and (pair := _equal(weights)):
                line = (
                    f"tensor-parallel ranks {pair[0]} and {pair[1]} hold parts of {name} with the same norm, "
                    f"{weights[pair[0]]:.9g}: they look like copies. Do the ranks use the same seed?"
                )
            if line is not None and name not in self._told:
                self._told.add(name)
                yield line

    def _of_ranks(self, record: LayerRecord) -> Iterator[str]:
        for quantity in OF_RANKS if record.shards else ():
            rule = self._ranks.setdefault(quantity, GrowthRule(self.threshold, _warm_up(quantity), itemgetter(0)))
            values: dict[tuple[str, int], float] = {}
            for name, norms in record.shards.items():
                if quantity in norms and record.facts[name].sharded and record.facts[name].init != "zeros":
                    for rank, norm in enumerate(norms[quantity]):
                        others = statistics.median(norms[quantity][:rank] + norms[quantity][rank + 1 :])
                        values[name, rank] = norm / others if others else 0.0
            for (name, rank), growth in rule.add(values).items():
                yield (
                    f"tensor-parallel rank {rank} is out of line: the {quantity} of its part of {name} grew by "
                    f"{_factor(growth.factor)} over {WINDOW} records relative to the other ranks; that of "
                    f"no other parameter grew or shrank by more than {_factor(growth.others)}"
                )


def _warm_up(statistic: str) -> int:
    return SMOOTH if statistic.startswith("weight_norm") else NOISY


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.3g}"


def _by_layer(record: LayerRecord) -> dict[str, dict[int, float]]:
    """Return the values to compare between layers, keyed by statistic and layer number: the layer statistics, and the
    weight norms of each kind of parameter. The output RMS is omitted, because a layer with a larger output also
    enlarges the outputs of all later layers. Instead, the statistic `output_gain` identifies the layer that enlarges
    the outputs.
    """
    found = {
        name: values
        for name, values in record.layers.items()
        if name != OUTPUT and not any(isinstance(value, list) for value in values.values())
    }
    for name, norms in record.parameters.items():
        layer = record.facts[name].layer
        if layer is not None and record.facts[name].init != "zeros":  # growth from an initial norm of 0 is always large
            kind = re.sub(r"^.*?\.\d+\.", "", name)
            found.setdefault(f"weight_norm of {kind}", {})[layer] = norms["weight_norm"]
    return found


def _equal(norms: list[float]) -> tuple[int, int] | None:
    """Return the first pair of ranks with equal, nonzero norms; None if there is no such pair."""
    for rank, norm in enumerate(norms):
        for other in range(rank):
            if norm > 0 and abs(norm - norms[other]) <= EQUAL * norm:
                return other, rank
    return None
