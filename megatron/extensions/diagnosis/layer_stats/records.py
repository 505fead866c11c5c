"""The statistics of one iteration, as they are logged. No torch.

`layers` holds a value of each layer, `parameters` the norms of each parameter, `shards` those of each tensor-parallel
rank's part or copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OUTPUT, GAIN = "output_rms", "output_gain"
"""Root mean square of what a layer puts out, and that over the one of the layer before."""


class Parameter(NamedTuple):
    """What is to be known of a parameter to read its norms."""

    layer: int | None
    """Number of its layer in the model; None outside of layers."""

    expert: bool
    sharded: bool
    """Whether tensor-parallel ranks hold parts of it; otherwise copies."""

    init: str
    """How its values begin: the `kind` of `Init`."""

    @property
    def random(self) -> bool:
        """Whether its initial values are random numbers."""
        return self.init in ("normal", "uniform", "log_of_uniform")


@dataclass
class LayerRecord:
    """Values by statistic, then by layer or name. Norms are L2 norms."""

    iteration: int
    layers: dict[str, dict[int, Any]] = field(default_factory=dict)
    parameters: dict[str, dict[str, float]] = field(default_factory=dict)
    shards: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    facts: dict[str, Parameter] = field(default_factory=dict)
    """Of the parameters; not logged."""

    def add_layer(self, statistic: str, number: int, value: Any) -> None:
        self.layers.setdefault(statistic, {})[number] = value

    def add_parameter(self, name: str, parameter: Parameter, quantity: str, squares: Sequence[float]) -> None:
        """`squares`: sum of each tensor-parallel rank. Those of experts are of whichever ranks hold them."""
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
        """Adds what follows from the outputs of two layers."""
        outputs = self.layers.get(OUTPUT, {})
        for number, value in outputs.items():
            if before := outputs.get(number - 1):
                self.add_layer(GAIN, number, value / before)

    def as_json(self) -> dict[str, Any]:
        """The record of metrics.jsonl: rows of layers are lists in the order of `layer`; null where a layer has no
        such value."""
        numbers = sorted({number for values in self.layers.values() for number in values})
        rows = {name: [values.get(number) for number in numbers] for name, values in sorted(self.layers.items())}
        found: dict[str, Any] = {"iteration": self.iteration, "layers": {"layer": numbers} | rows}
        found["parameters"] = self.parameters
        return found | ({"tensor_parallel_shards": self.shards} if self.shards else {})
