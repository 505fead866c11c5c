"""Prints a verdict on the layout of a run, and the best layouts for it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megatron.extensions.planner.device_file import read_device
from megatron.extensions.planner.dry_run.memory import GIB
from megatron.extensions.planner.dry_run.step import DeviceError
from megatron.extensions.planner.suggest.costs import LayoutCosts
from megatron.extensions.planner.suggest.search import Effort, Found, LayoutSearch, ranked_with
from megatron.extensions.planner.suggest.space import SearchedRun
from megatron.extensions.planner.suggest.verdict import (
    Cluster,
    early_lines,
    effort_line,
    found_record,
    illegal_lines,
    nearest_lines,
    standing_line,
    table_lines,
    verdict_lines,
    verdict_record,
)
from megatron.training.config.output_files import write_json
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

SUGGESTED = 10

MOST_PREDICTED = 150
"""Predictions after which a search ends early, unless it is asked to go on."""

MOST_TIMED = 90
"""Families whose layers are timed, unless a search is asked to go on."""

SECONDS_BETWEEN_LINES = 10.0
"""Of progress, on standard error."""


class Progress:
    """Says now and then how far a search is."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, effort: Effort) -> None:
        if time.monotonic() >= self._said + SECONDS_BETWEEN_LINES:
            self._said = time.monotonic()
            counts = f"{effort.traced:,} kinds of layers timed, {effort.predicted:,} layouts predicted"
            print(f"searching: {counts}; Ctrl-C ends with what is found", file=sys.stderr, flush=True)


@contextmanager
def ended_by_interrupt(search: LayoutSearch) -> Iterator[None]:
    """The first SIGINT ends the search early, the second one the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, before)
        search.end_early()

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_suggestions(
    config: RunConfig,
    world_size: int,
    device: str,
    gpus_per_node: int | None = None,
    device_memory: float | None = None,
    plan_file: str | None = None,
    problems: Sequence[Problem] = (),
    most: tuple[int | None, int | None] = (None, None),
) -> bool:
    """Prints whether the layout of a resolved configuration fits devices of `device_memory` GiB (by default what the
    device file says) and how long it takes, and the ten fastest layouts that fit. `problems` are those of the
    configuration. Returns whether any layout is legal.

    The search ends early after the first of `most` predictions, and times the second of it of families.

    Writes the same to `plan_file` as JSON; if it is "" the JSON is all that is printed. Raises OutputError if it cannot
    be written, DeviceError if no step of this kind can be predicted.
    """
    speeds, run = read_device(device), SearchedRun(config, world_size)
    if run.unavoidable(problems):
        return False
    costs = LayoutCosts(run, speeds, gpus_per_node or speeds.ranks_of_node(world_size))
    cluster = Cluster(costs, int((device_memory or speeds.memory_gib) * GIB))
    record: dict[str, Any] = {
        "world_size": world_size,
        "device": speeds.name,
        "gpus_per_node": costs.gpus_per_node,
        "device_memory": cluster.limit,
    }

    def show(title: str, lines: Sequence[str]) -> None:
        if plan_file != "":
            print("\n".join([title, *(f"  {line}" for line in lines)]), flush=True)

    title = f"The given layout on {world_size} x {speeds.name}, {costs.gpus_per_node} a node, predicted"
    mine: Found | None = None
    search = LayoutSearch(costs, cluster.limit, *most, progress=Progress())
    try:
        if problems:
            show(title, list(illegal_lines(problems)))
            record["given"] = {"legal": False, "problems": [str(problem) for problem in problems]}
        else:
            mine = Found(run.own_layout, config, costs.step(config), tuple(costs.memory(config)), given=True)
            own = config, cluster, mine.step, mine.memory
            show(title, list(verdict_lines(*own)))
            record["given"] = verdict_record(*own)
        with ended_by_interrupt(search):
            found = search.best(SUGGESTED)
        if mine is not None and mine.fullest.total <= cluster.limit:
            found = ranked_with(mine, found)
            standing = [standing_line(found)]
        else:
            standing = []
        nearest = None if found else search.nearest()
    except ValueError as error:
        raise DeviceError(str(error)) from error
    record["suggestions"] = [found_record(each, cluster) for each in found]
    record["searched"] = {"space": search.costs.run.space.record, **vars(search.effort)}
    if found:
        count = sum(not each.given for each in found)
        title = f"Suggested layouts, {count} of the fastest that fit" + (", beside the given one" if standing else "")
        show(title, [*standing, *table_lines(found, cluster)])
    else:
        show("Suggested layouts", list(nearest_lines(nearest, cluster)))
        record["nearest"] = None if nearest is None else found_record(nearest, cluster)
    show("Search", [effort_line(search.effort, cluster), *early_lines(search.effort, found)])
    if plan_file is not None:
        write_json(record, plan_file)
    return bool(found or nearest)
