"""Groups of parameters with a learning rate or weight decay of their own. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

SHOWN = 5
"""Names of parameters that a line lists."""


@dataclass(frozen=True)
class ParamGroup:
    """How the update of some parameters differs from that of the others."""

    lr_mult: float = 1.0
    """Factor of the learning rate."""

    wd_mult: float = 1.0
    """Factor of the scheduled weight decay; 0 for none."""

    weight_decay: float | None = None
    """Weight decay in place of the scheduled one."""

    decoupled: bool = False
    """Whether the learning rate is that of --decoupled-lr."""

    @property
    def decays(self) -> bool:
        """Whether there is any weight decay."""
        return bool(self.wd_mult if self.weight_decay is None else self.weight_decay)

    @property
    def order(self) -> tuple[float, ...]:
        """Key that sorts groups: those that decay first, then by their settings."""
        own = -1.0 if self.weight_decay is None else self.weight_decay
        return (not self.decays, self.decoupled, self.lr_mult != 1, self.lr_mult, self.wd_mult, own)

    def lr(self, lr: float, decoupled_lr: float | None) -> float:
        """Its learning rate, given that of the others and that of --decoupled-lr."""
        return self.lr_mult * (decoupled_lr if self.decoupled and decoupled_lr is not None else lr)

    def decay(self, weight_decay: float) -> float:
        """Its weight decay, given the scheduled one."""
        return self.wd_mult * weight_decay if self.weight_decay is None else self.weight_decay

    def __str__(self) -> str:
        rate = "decoupled lr" if self.decoupled else "lr"
        rate += f" x {self.lr_mult:g}" if self.lr_mult != 1 else ""
        if not self.decays:
            return f"{rate}, no weight decay"
        if self.weight_decay is not None:
            return f"{rate}, weight decay {self.weight_decay:g}"
        return f"{rate}, weight decay" + (f" x {self.wd_mult:g}" if self.wd_mult != 1 else "")


def lines_of_groups(groups: Mapping[str, tuple[ParamGroup, int]]) -> Iterable[str]:
    """A line for each group of parameters, given name -> (group, elements)."""
    members: dict[ParamGroup, list[str]] = {}
    for name in sorted(groups):
        members.setdefault(groups[name][0], []).append(name)
    for group in sorted(members, key=lambda group: group.order):
        names = members[group]
        elements = sum(groups[name][1] for name in names)
        kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names))
        more = f" and {len(kinds) - SHOWN} more" if len(kinds) > SHOWN else ""
        yield (
            f"parameter group ({group}): {len(names)} parameters, {elements:,} elements: "
            f"{', '.join(kinds[:SHOWN])}{more}"
        )
