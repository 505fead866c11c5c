"""Names the layer or the tensor-parallel rank whose statistics are out of line. No torch.

Layers are compared by each statistic of `layers` that is a number, and parameters of one kind, as all
`mlp.linear_fc1.weight`, by their weights. Tensor-parallel ranks are compared by the norms of the weights and gradients
of their parts of each parameter, beside those of the other ranks. `growth` holds the rule for both. Beyond that, copies
must be equal, and parts with equal norms have been drawn from one seed, of which a loss says nothing.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from collections.abc import Iterator

from megatron.extensions.diagnosis.layer_stats.growth import WINDOW, Growth, GrowthRule
from megatron.extensions.diagnosis.layer_stats.records import OUTPUT, LayerRecord

SMOOTH, NOISY = 10, 40
"""Earlier windows that the rule asks for: for norms of weights, which no step changes much, and for what depends on the
samples of a step."""

FEWEST = 3
"""Layers that are needed to say what the others do."""

OF_RANKS = ("weight_norm", "grad_norm", "output_norm")

EQUAL = 1e-12
"""Relative difference of norms of parts below which they hold the same values: those of n random numbers differ by
about 1 / sqrt(2 n)."""

ROUNDING = 1e-6
"""Relative difference of norms of copies that may be rounding."""


class LayerAlarms:
    """Judges the records of a run, one after the other. After a resumption it begins anew."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: --layer-growth-threshold; 0 for no alarms."""
        self.threshold = threshold
        self._layers: dict[str, GrowthRule[int]] = {}
        self._ranks: dict[str, GrowthRule[tuple[str, int]]] = {}
        self._told: set[str] = set()

    def judge(self, record: LayerRecord) -> list[str]:
        """A line for each layer and parameter that is out of line since this record."""
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
            line += f" records beside the median layer's, no other layer's by more than {_factor(grown[first].others)}"
            yield line + "".join(f"; its {name} by {_factor(grown[name].factor)}" for name in more)

    def _of_parts(self, record: LayerRecord) -> Iterator[str]:
        """What the parts and copies of a parameter on the tensor-parallel ranks say by themselves, once for each."""
        for name, norms in record.shards.items():
            facts, weights = record.facts[name], norms["weight_norm"]
            line = None
            if not facts.sharded and max(weights) - min(weights) > ROUNDING * max(weights):
                shown = ", ".join(f"{norm:.9g}" for norm in weights)
                line = (
                    f"{name} should be equal on all tensor-parallel ranks and is not: its norms are {shown}. Ranks "
                    "have diverged; --check-replicas tells where"
                )
            elif facts.sharded and facts.random and (pair := _equal(weights)):
                line = (
                    f"tensor-parallel ranks {pair[0]} and {pair[1]} hold parts of {name} with the same norm, "
                    f"{weights[pair[0]]:.9g}: they look like copies. Do the ranks draw from one seed?"
                )
            if line is not None and name not in self._told:
                self._told.add(name)
                yield line

    def _of_ranks(self, record: LayerRecord) -> Iterator[str]:
        for quantity in OF_RANKS if record.shards else ():
            rule = self._ranks.setdefault(quantity, GrowthRule(self.threshold, _warm_up(quantity), _name))
            values: dict[tuple[str, int], float] = {}
            for name, norms in record.shards.items():
                if quantity in norms and record.facts[name].sharded and record.facts[name].init != "zeros":
                    for rank, norm in enumerate(norms[quantity]):
                        others = statistics.median(norms[quantity][:rank] + norms[quantity][rank + 1 :])
                        values[name, rank] = norm / others if others else 0.0
            for (name, rank), growth in rule.add(values).items():
                yield (
                    f"tensor-parallel rank {rank} is out of line: the {quantity} of its part of {name} grew by "
                    f"{_factor(growth.factor)} over {WINDOW} records beside the other ranks', that of no other "
                    f"parameter by more than {_factor(growth.others)}"
                )


def _warm_up(statistic: str) -> int:
    return SMOOTH if statistic.startswith("weight_norm") else NOISY


def _name(member: tuple[str, int]) -> str:
    return member[0]


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.3g}"


def _by_layer(record: LayerRecord) -> dict[str, dict[int, float]]:
    """Values of layers by statistic, and norms of weights by kind of parameter. A layer that puts out more makes all
    behind it do so: `output_gain` tells which one it is."""
    found = {
        name: values
        for name, values in record.layers.items()
        if name != OUTPUT and not any(isinstance(value, list) for value in values.values())
    }
    for name, norms in record.parameters.items():
        layer = record.facts[name].layer
        if layer is not None and record.facts[name].init != "zeros":  # from 0 on any growth is large
            kind = re.sub(r"^.*?\.\d+\.", "", name)
            found.setdefault(f"weight_norm of {kind}", {})[layer] = norms["weight_norm"]
    return found


def _equal(norms: list[float]) -> tuple[int, int] | None:
    """The first two ranks whose norms are equal and not 0."""
    for rank, norm in enumerate(norms):
        for other in range(rank):
            if norm > 0 and abs(norm - norms[other]) <= EQUAL * norm:
                return other, rank
    return None
