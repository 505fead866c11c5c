"""Names of the rows that `megatron.testing.parity` runs. This module checks row names without importing torch, so that
a wrong name is refused immediately."""

from __future__ import annotations

import difflib
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from megatron.core.pipeline_parallel.schedules import PIPELINE_SCHEDULES


def _schedule_of(flags: str) -> str | None:
    """Return the value of --pipeline-schedule in `flags`, or None if the flag is missing."""
    return next(iter(re.findall(r"--pipeline-schedule (\S+)", flags)), None)


_LAYOUTS = tomllib.loads(Path(__file__).with_name("parity_layouts.toml").read_text(encoding="utf-8"))
LAYOUTS, EXPERT_LAYOUTS = (
    {name: flags for name, flags in _LAYOUTS[kind].items() if _schedule_of(flags) in (None, *PIPELINE_SCHEDULES)}
    for kind in ("dense", "experts")
)
CHECKPOINTS = ("dp2-to-tp2-sp-pp2-dp2", "tp2-sp-pp2-dp2-to-dp2")
EXPERT_CHECKPOINTS = ("ep2-to-tp2-sp-pp2-dp2", "tp2-sp-pp2-ep2-to-dp2-replicated")
ONE_PROCESS = "one-process"
FINITE_DIFFERENCES = "finite-differences"
GIVEN = "given"


def of_schedule(schedule: str) -> dict[str, str]:
    """Return a dict from layout names to flags. The layouts use the pipeline schedule `schedule`, for which there are
    no predefined rows."""
    return {
        f"pp2-{schedule}": f"--pp 2 --pipeline-schedule {schedule}",
        f"tp2-sp-pp2-dp2-{schedule}": f"--tp 2 --sequence-parallel --pp 2 --dp 2 --pipeline-schedule {schedule}",
    }


def possible_names(flags: Sequence[str]) -> list[str] | None:
    """Return the names of all rows that may exist for a model with these flags. The flags are not parsed or validated
    yet.

    Return None if the flags name a file with further flags, because the flags in this file may select a schedule for
    which there are additional rows.
    """
    if any(flag.partition("=")[0] in ("--config", "--yaml-cfg") for flag in flags):
        return None
    schedule = _schedule_of(" ".join(flags).replace("=", " "))
    rows = LAYOUTS | EXPERT_LAYOUTS | (of_schedule(schedule) if schedule else {})
    return [FINITE_DIFFERENCES, GIVEN, *rows, *CHECKPOINTS, *EXPERT_CHECKPOINTS]


def chosen(wanted: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return the names of the rows to run, in the order of `known`. Raises ValueError for an unknown name."""
    problems = []
    for name in wanted or ():
        if name not in known:
            longer = [row for row in known if row.startswith(f"{name}-")]
            close = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            near = f"; did you mean {' or '.join(close)}?" if close else ";"
            problems.append(f"--layouts {name}: no such row{near} --list prints all rows with their flags")
    if problems:
        raise ValueError("\n".join(problems))
    return [name for name in known if wanted is None or name in wanted]


def print_errors(error: ValueError) -> None:
    """Print each problem in an error's message on a separate line."""
    for line in str(error).split("\n"):
        print(f"error: {line}", file=sys.stderr)
