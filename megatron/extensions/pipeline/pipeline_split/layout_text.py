"""Parser of --pipeline-model-parallel-layout, which lists all pipeline stages. This module does not import torch.

A stage is a sequence of E (embedding), t (transformer layer), m (multi-token prediction module) and L (norm, head and
loss). The character | separates stages. The symbol m may occur only directly before L. Multi-token prediction modules
use the output head of L. The suffix *n repeats a symbol or a group in parentheses n times: `Et*3|(tt|)*2mL` is
`Ettt|tt|tt|mL`. Commas and spaces are ignored.
"""

from __future__ import annotations

import re

LONGEST = 100_000
"""Maximum number of symbols in a layout after all repetitions are expanded. Longer layouts are assumed to be
mistakes."""

TOKEN = re.compile(r"([EtmL|()])|\*(\d+)")


def layers_of_stages(text: str) -> tuple[int, ...]:
    """Return the number of transformer layers in each stage, in the order of the stages.

    Raise ValueError if the text is invalid. The error message states the violated rule and, after a semicolon, a
    remedy.
    """
    stages = expanded(text).split("|")
    whole = "".join(stages)
    if whole.count("E") != 1 or not stages[0].startswith("E"):
        raise ValueError("must begin with E, the embedding, and contain no other E; use for example Et*3|t*3L")
    if whole.count("L") != 1 or not stages[-1].endswith("L"):
        raise ValueError("must end with L, the loss, and contain no other L; use for example Et*3|t*3L")
    if "m" in whole.rstrip("L").rstrip("m") or whole.count("m") != stages[-1].count("m"):
        rule = "may contain m, multi-token prediction, only directly before L in the last stage, whose head m uses"
        raise ValueError(f"{rule}; use for example Et*3|t*3|mL")
    return tuple(stage.count("t") for stage in stages)


def multi_token_depths(text: str) -> int:
    """Return the number of multi-token prediction modules in the layout `text`.

    Raise ValueError if `text` does not follow the grammar.
    """
    return expanded(text).count("m")


def expanded(text: str) -> str:
    """Expand repetitions and groups, and remove commas and spaces. Raise ValueError if `text` does not follow the
    grammar."""
    rest = re.sub(r"[,\s]", "", text)
    # Stack of lists: the first list contains the items outside parentheses, and each further list contains the items
    # inside one open parenthesis.
    open_groups: list[list[str]] = [[]]
    at = 0
    while at < len(rest):
        token = TOKEN.match(rest, at)
        if token is None:
            raise ValueError(f"cannot be read at {rest[at:]!r}; use E, t, m, L, |, *n and parentheses")
        symbol, count = token.groups()
        if symbol == "(":
            open_groups.append([])
        elif symbol == ")" and len(open_groups) > 1:
            group = "".join(open_groups.pop())
            open_groups[-1].append(group)
        elif symbol == ")":
            raise ValueError("closes a group that is not open; remove a )")
        elif symbol:
            open_groups[-1].append(symbol)
        elif not open_groups[-1]:
            raise ValueError(f"has nothing before {token[0]} to repeat; put it after a symbol or a group")
        else:
            if len(open_groups[-1][-1]) * int(count) > LONGEST:
                raise ValueError(f"has more than {LONGEST} symbols; use smaller repetitions")
            open_groups[-1][-1] *= int(count)
        at = token.end()
    if len(open_groups) > 1:
        raise ValueError("does not close a group; add a )")
    return "".join(open_groups[0])
