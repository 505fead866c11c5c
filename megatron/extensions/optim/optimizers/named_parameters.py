"""Parameter groups selected by name (--param-group), and frozen parameters (--freeze).

This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from math import isfinite

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.config.param_groups import SHOWN, ParameterRule, ParamGroup
from megatron.core.param_meta import ParamMeta
from megatron.extensions.optim.optimizers.flags import NamedParameterFlags
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

SETTINGS = ("lr_mult", "wd_mult", "weight_decay")
"""Keys that a --param-group expression can set."""


class NamedParameters(ParameterRule):
    """Parameter rule for --param-group and --freeze. The rule selects parameters by their names in the unsharded
    model."""

    def __init__(self, optimizer: OptimizerConfig) -> None:
        options = optimizer.options(NamedParameterFlags)
        self.expressions, self.frozen = options.param_group or (), options.freeze or ()
        self.groups = bool(self.expressions)

    def group(self, group: ParamGroup, meta: ParamMeta) -> ParamGroup:
        """Apply the --param-group expressions to `group`."""
        for text in self.expressions:
            group = group_rule(text).applied(group, meta.name)
        return group

    def freezes(self, meta: ParamMeta) -> bool:
        return any(re.search(pattern, meta.name) for pattern in self.frozen)

    def errors(self, metas: Collection[ParamMeta]) -> Iterator[str]:
        """Yield an error for each --param-group or --freeze expression that matches no parameter in `metas`, which
        contains all parameters of the model. Also yield an error if all parameters are frozen."""
        names = [meta.name for meta in metas]
        texts = [("--freeze", pattern, pattern) for pattern in self.frozen]
        texts += [("--param-group", text, group_rule(text).pattern) for text in self.expressions]
        yield from filter(None, (unmatched(*text, names) for text in texts))
        if self.frozen and all(map(self.freezes, metas)):
            some = ", ".join(sorted(names)[:: max(1, len(names) // SHOWN)][:SHOWN])
            yield (
                f"--freeze {' '.join(self.frozen)}: matches all {len(names)} parameters, which leaves nothing to "
                f"train; names are for example {some}"
            )


@dataclass(frozen=True)
class GroupRule:
    """Parsed --param-group expression. The `settings` apply to all parameters whose names match the regular expression
    `pattern`."""

    pattern: str
    settings: Mapping[str, float]

    def applied(self, group: ParamGroup, name: str) -> ParamGroup:
        """Return a copy of `group` with this rule's settings if the rule's pattern matches the parameter `name`.
        Otherwise, return `group` unchanged."""
        if not re.search(self.pattern, name):
            return group
        group = replace(group, lr_mult=self.settings.get("lr_mult", group.lr_mult))
        if (decay := self.settings.get("weight_decay")) is not None:
            # The spellings 0, 0.0 and 0e0 of a weight decay result in the same parameter group.
            group = replace(group, wd_mult=float(decay > 0), weight_decay=decay or None)
        elif (factor := self.settings.get("wd_mult")) is not None:
            group = replace(group, wd_mult=factor, weight_decay=None)
        return group


@cache
def group_rule(text: str) -> GroupRule:
    """Parse a --param-group expression, 'REGEX key=value ...'. Raise ValueError if the expression is invalid. The
    message has the form `--param-group text: rule; remedy`."""
    where = f"--param-group {text}"
    example = "write for example --param-group 'norm lr_mult=0.1 weight_decay=0'"
    pattern, *assignments = text.split() or [""]
    if not pattern or not assignments:
        raise ValueError(f"{where}: needs a regular expression and at least one key=value; {example}")
    try:
        re.compile(pattern)
    except re.error as error:
        rule = f"cannot be read as a regular expression: {error}"
        raise ValueError(f"{where}: {rule}; use Python's regular expressions") from error
    settings = {}
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        if key not in SETTINGS:
            raise ValueError(f"{where}: {key!r} is not one of {', '.join(SETTINGS)}; {example}")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{where}: {key} needs a number, not {value!r}; {example}") from None
        if not isfinite(number) or number < 0:
            raise ValueError(f"{where}: {key} must be finite and not negative; {example}")
        if key in settings:
            raise ValueError(f"{where}: sets {key} twice; keep one")
        settings[key] = number
    if {"wd_mult", "weight_decay"} <= settings.keys():
        rule = (
            "sets the weight decay twice: wd_mult is a factor of the scheduled weight decay, weight_decay replaces it"
        )
        raise ValueError(f"{where}: {rule}; keep one")
    return GroupRule(pattern, settings)


def unmatched(flag: str, value: str, pattern: str, names: Collection[str]) -> str | None:
    """Return an error message if the pattern matches none of `names`; otherwise, return None. The message lists the
    most similar names."""
    if any(re.search(pattern, name) for name in names):
        return None
    words = re.sub(r"\\.|[^\w.]", " ", pattern.replace("\\.", ".")).strip()

    def likeness(name: str) -> float:
        return SequenceMatcher(None, words, name, autojunk=False).find_longest_match().size

    near = sorted(sorted(names), key=likeness, reverse=True)[:SHOWN]
    return f"{flag} {value}: matches no parameter; the nearest names are {', '.join(near)}"


def rules(c: RunConfig, world_size: int) -> Iterator[Problem]:
    """Check the expressions of --freeze and --param-group."""
    options = c.options(NamedParameterFlags)
    for pattern in options.freeze or ():
        try:
            re.compile(pattern)
        except re.error as error:
            remedy = "use Python's regular expressions"
            yield Problem("--freeze", pattern, f"cannot be read as a regular expression: {error}", remedy)
    for text in options.param_group or ():
        try:
            group_rule(text)
        except ValueError as error:
            yield Problem.of_message("--param-group", text, str(error))
