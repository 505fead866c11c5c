"""Replace the values that problems suggest with the nearest values that all rules accept. This module does not import
torch.

The message of a rule suggests the nearest value that this rule accepts. Because another rule for the same flag may
refuse the suggested value, this module tries each value before a message suggests it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron.training.config.flags import spelling_table, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

NAMED = re.compile(r"(?P<lead>.*?)nearest: (?P<first>\d+)(?: or (?P<second>\d+))?(?=$|[,;])(?P<rest>.*)")
"""Regular expression for a remedy that suggests nearest values, with groups for the leading text, one or two values,
and further remedies."""

TRIED = 8
"""Maximum number of values to try among the nearest values that rules suggest."""

SCANNED = 32
"""Number of small integers to try if no suggested value is valid. Many flags that count groups or layers accept small
integers."""

Judge = Callable[[RunConfig], Sequence[Problem]]


def with_legal_values(problems: Sequence[Problem], config: RunConfig, judge: Judge) -> list[Problem]:
    """Return the problems with legal values in their remedies. If a remedy is "nearest: N", N is replaced, where
    possible, with a value that all rules for the flag accept.

    If no such value is found, the remedy names the rule that refuses the suggested value. `judge` is a function that
    returns the problems of a configuration.
    """
    return [_with_legal_value(each, problems, config, judge) for each in problems]


def _with_legal_value(problem: Problem, problems: Sequence[Problem], config: RunConfig, judge: Judge) -> Problem:
    flag, _ = spelling_table().get(problem.flag, (None, True))
    named = NAMED.fullmatch(problem.remedy)
    if named is None or flag is None or flag.kind is not int or flag.takes_several:
        return problem
    # Ignore problems that do not depend on the value, such as a missing flag.
    lasting = {_kind(each) for each in problems if each.flag == problem.flag and NAMED.fullmatch(each.remedy) is None}

    def refusals(value: int) -> list[Problem]:
        found = judge(with_named(config, {flag.field: value}))
        return [each for each in found if each.flag == problem.flag and _kind(each) not in lasting]

    first = int(named["first"])
    given = problem.value if isinstance(problem.value, int) else first
    tried: dict[int, list[Problem]] = {}
    legal: list[int] = []
    for value in _candidates(problem, given, tried):
        if legal and value not in _values(problem):
            break
        if value not in tried:
            tried[value] = refusals(value)
            legal += [] if tried[value] else [value]
    if legal:
        values = f"nearest: {' or '.join(map(str, sorted(legal)))}"
        return replace(problem, remedy=f"{named['lead']}{values}{named['rest']}")
    other = next((each for each in tried[first] if _kind(each) != _kind(problem)), tried[first][0])
    values = f"correct another flag, as {problem.flag} {first} {other.rule}"
    return replace(problem, remedy=f"{named['lead']}{values}{named['rest']}")


def _candidates(problem: Problem, given: int, tried: dict[int, list[Problem]]) -> Iterator[int]:
    """Yield values that may replace the refused value of a flag, in the order in which they are tried.

    The first candidates are values that the remedy of `problem` suggests. The next candidates are values that other
    rules suggest when they refuse a candidate. If rules require multiples of certain numbers, common multiples of these
    numbers are tried next. Small numbers are tried last. `tried` maps each value tried so far to the problems that
    rules found with this value.
    """
    named, steps = [*_values(problem)], [_step(problem)]
    for value in named:
        yield value
        for refusal in tried[value] if len(tried) < TRIED else ():
            named += [each for each in _values(refusal) if each not in named]
            steps.append(_step(refusal))
    step = math.lcm(*steps)
    yield from (value for value in (given // step * step, (given // step + 1) * step) if value > 0)
    yield from sorted(range(1, SCANNED + 1), key=lambda value: abs(value - given))


def _values(problem: Problem) -> list[int]:
    """Return the values that the remedy of a problem suggests as nearest legal values."""
    found = NAMED.fullmatch(problem.remedy)
    return [] if found is None else [int(each) for each in (found["first"], found["second"]) if each and int(each)]


def _step(problem: Problem) -> int:
    """Estimate the step between values that a rule accepts, given the values that a problem suggests."""
    values = _values(problem)
    return abs(values[-1] - (values[0] if len(values) > 1 else 0)) or 1 if values else 1


def _kind(problem: Problem) -> str:
    """Return the rule of a problem with "N" in place of each number."""
    return re.sub(r"\d+", "N", problem.rule)
