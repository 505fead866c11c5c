"""Parameter groups with separate learning rates or weight decays, and the rules that form these groups.

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from megatron.core.config.flag_spec import Section
from megatron.core.param_meta import Init, ParamMeta
from megatron.core.registry import Registry

SHOWN = 5
"""Maximum number of parameter names that are printed for one group."""


@dataclass(frozen=True)
class ParamGroup:
    """Settings that the optimizer applies to a group of parameters instead of the default settings."""

    lr_mult: float = 1.0
    """Factor by which the learning rate is multiplied."""

    eps_mult: float = 1.0
    """Factor by which Adam's epsilon (--adam-eps) is multiplied."""

    wd_mult: float = 1.0
    """Factor by which the scheduled weight decay is multiplied; 0 for no weight decay."""

    weight_decay: float | None = None
    """Constant weight decay that replaces the scheduled weight decay; None means that the scheduled weight decay
    applies."""

    decoupled: bool = False
    """True if --decoupled-lr sets the learning rate."""

    @property
    def decays(self) -> bool:
        """True if the group's weight decay is not zero."""
        return bool(self.wd_mult if self.weight_decay is None else self.weight_decay)

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key of parameter groups. Groups with weight decay precede groups without weight decay; then the other
        settings determine the order."""
        own = -1.0 if self.weight_decay is None else self.weight_decay
        return (not self.decays, self.decoupled, self.lr_mult != 1, self.lr_mult, self.wd_mult, own, self.eps_mult)

    def lr(self, lr: float, decoupled_lr: float | None) -> float:
        """Return the group's learning rate, given the base learning rate and --decoupled-lr."""
        return self.lr_mult * (decoupled_lr if self.decoupled and decoupled_lr is not None else lr)

    def decay(self, weight_decay: float) -> float:
        """Return the group's weight decay, given the scheduled weight decay."""
        return self.wd_mult * weight_decay if self.weight_decay is None else self.weight_decay

    def __str__(self) -> str:
        rate = "decoupled lr" if self.decoupled else "lr"
        rate += f" x {self.lr_mult:g}" if self.lr_mult != 1 else ""
        rate += f", epsilon x {self.eps_mult:g}" if self.eps_mult != 1 else ""
        if not self.decays:
            return f"{rate}, no weight decay"
        if self.weight_decay is not None:
            return f"{rate}, weight decay {self.weight_decay:g}"
        return f"{rate}, weight decay" + (f" x {self.wd_mult:g}" if self.wd_mult != 1 else "")


class ParameterRule:
    """Base class of rules that change the settings of individual parameters. A rule can use everything in the
    `ParamMeta` of a parameter: its role, shape, fan-in, layer and name.

    The result of each method must depend only on the flags and the `ParamMeta`, because every rank must obtain the same
    result, and plans also call the methods.
    """

    groups = True
    """True if the rule may change the group to which a parameter belongs."""

    def group(self, group: ParamGroup, meta: ParamMeta) -> ParamGroup:
        """Return the parameter group for a parameter. `group` is the group that the flags and earlier rules chose for
        the parameter."""
        return group

    def freezes(self, meta: ParamMeta) -> bool:
        """Return whether a parameter is frozen."""
        return False

    def initial(self, meta: ParamMeta, init: Init) -> Init:
        """Return the initialization of a parameter. `init` is the initialization chosen by the parameter's role or by
        earlier rules."""
        return init

    def errors(self, metas: Collection[ParamMeta]) -> Iterable[str]:
        """Return an error message for each reason why the rule does not suit the model. `metas` describes all
        parameters of the model."""
        return ()

    def lines(self, metas: Collection[ParamMeta]) -> Iterable[str]:
        """Return the lines that a plan prints about the rule. `metas` describes the trained parameters of the whole
        model."""
        return ()


class BuildsRule(Protocol):
    """Class or function that creates a parameter rule from a run's `OptimizerConfig`. An extension obtains the values
    of its flags from `optimizer.options(Cls)`, where Cls is the dataclass that defines them."""

    def __call__(self, optimizer: Section) -> ParameterRule: ...


@dataclass(frozen=True)
class RuleFacts:
    when: Callable[[Section], bool]
    """Predicate that decides from the `OptimizerConfig` whether the rule applies to a run."""


PARAMETER_RULES = Registry("rule of parameters", RuleFacts, protocol=BuildsRule)
"""Registry of parameter rules. Each rule receives the groups that earlier rules chose.

    @PARAMETER_RULES.register("small gates", when=lambda optimizer: True)
    class SmallGates(ParameterRule):
        def group(self, group: ParamGroup, meta: ParamMeta) -> ParamGroup:
            return replace(group, lr_mult=0.1) if meta.role == "gate" else group
"""


def lines_of_groups(groups: Mapping[str, tuple[ParamGroup, int]]) -> Iterable[str]:
    """Yield a line of text that describes each parameter group. The argument maps each parameter name to its group and
    its number of elements."""
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
