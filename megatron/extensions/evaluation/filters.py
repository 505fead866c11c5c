"""What is read out of a generated text before it is compared: the steps of a task's `filter_list`. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[str], str]


def regex(regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0, fallback: str = "[invalid]") -> Step:
    """The match number `group_select` of all in the text, of several groups the first that is not empty; `fallback`
    without one. Raises re.error for a bad pattern."""
    pattern = re.compile(regex_pattern)

    def step(text: str) -> str:
        matches = pattern.findall(text)
        if not matches:
            return fallback
        match = matches[group_select]
        if isinstance(match, tuple):
            match = next((group for group in match if group), fallback)
        return match.strip()

    return step


def mapped(mapping_dict: Mapping[str, Any], default_value: Any = None) -> Step:
    return lambda text: mapping_dict.get(text, default_value)


FILTERS: dict[str, Callable[..., Step]] = {
    "take_first": lambda: str,  # one answer is generated
    "regex": regex,
    "remove_whitespace": lambda: str.strip,
    "lowercase": lambda: str.lower,
    "uppercase": lambda: str.upper,
    "map": mapped,
}
"""Name -> what makes the step of its options."""
