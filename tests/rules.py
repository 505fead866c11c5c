"""Tables of configuration rules: flags, and the problems that validation reports for them.

Each unindented line is one test case. The flags of a case are added to the flags of the last line that begins with
`base:`. A case with several ranks begins with `N ranks:`, and a case that needs an extension begins with `[EXTENSION]`.
Each indented line below a case is the expected beginning of a problem or notice. If the line begins with `... `, the
rest may occur anywhere in the problem or notice. A case without indented lines is a valid configuration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron.training.config.arguments import parse_args
from megatron.training.config.validation import notices, resolve, validate

BASE = (
    "--num-layers 14 --hidden-size 48 --num-attention-heads 12 --seq-length 16 --mock-data --train-iters 10 --lr 1e-3"
)
LINE = re.compile(r"(?:(?P<ranks>\d+) ranks: )?(?:\[(?P<extension>\w+)\] )?(?P<flags>.*)")


def problems(flags: str, world_size: int = 1, base: str = BASE) -> list[str]:
    """Return the messages about a configuration: problems, then notices."""
    config = parse_args([*base.split(), *flags.split()])
    resolved = resolve(config, world_size)
    assert validate(config, world_size) == validate(resolved, world_size)
    return [str(problem) for problem in (*validate(config, world_size), *notices(config, world_size))]


@dataclass(frozen=True)
class Case:
    """Case in a table of configuration rules."""

    base: str
    ranks: int
    extension: str | None
    flags: str
    told: tuple[str, ...]

    def __str__(self) -> str:
        return self.flags.replace("--", "") or "base"


def read_table(path: Path) -> Iterator[Case]:
    """Return the cases of a table."""
    base, heads, told = "", list[tuple[str, str]](), list[list[str]]()
    for line in path.read_text().splitlines():
        if line.startswith("base: "):
            base = line.removeprefix("base: ")
        elif line.startswith(" "):
            told[-1].append(line.strip())
        elif line and not line.startswith("#"):
            heads.append((base, line))
            told.append([])
    for (own_base, head), said in zip(heads, told, strict=True):
        found = LINE.fullmatch(head)
        assert found is not None
        yield Case(own_base, int(found["ranks"] or 1), found["extension"], found["flags"], tuple(said))


def check(case: Case) -> None:
    """Assert that validation reports exactly the messages of a case."""
    left = problems(case.flags, case.ranks, case.base)
    for line in case.told:
        part = line.removeprefix("... ")
        matching = [each for each in left if (part in each if line != part else each.startswith(part))]
        assert matching, f"{line!r} is not among the messages: {left}"
        left.remove(matching[0])
    assert not left
