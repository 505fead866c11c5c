"""Search for a layout with which a run can continue on fewer ranks without changing its global batch size. The result
is the layout that fits in memory and for which the planner predicts the fastest step. This module does not import
torch.

If the planner has no performance data for the device, for example on CPUs, layouts are ranked with the data of an H100.
The search also considers the layout that the run's flags describe, with fewer data-parallel replicas.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from math import inf
from pathlib import Path
from typing import NamedTuple

from megatron.extensions.plan.planner.device_file import DeviceFile, device_names, read_device
from megatron.extensions.plan.planner.memory import GIB
from megatron.extensions.plan.planner.suggest.costs import LayoutCosts
from megatron.extensions.plan.planner.suggest.search import Effort, Found, LayoutSearch
from megatron.extensions.plan.planner.suggest.space import Family, Layout, Pipeline, Saving, SearchedRun
from megatron.training.config.run_config import RunConfig
from megatron.training.config.validation import validate

SEARCH = 5.0
"""Time limit in seconds for a search. After this time, the search returns the best layout that it has found."""

FAMILIES = 8
"""Number of layout families (`space.Family`) for which the search predicts step times."""

SIZES = 3
"""Number of world sizes to compare: the largest one that has a legal layout, and the next smaller ones."""

LISTED = 200
"""Maximum number of layouts that are validated for each world size. Validation ends earlier if a legal layout is
found."""

DEFAULT_DEVICE = "h100"


def device_here(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> DeviceFile:
    """Return the planner's data about the GPU of this machine: its speed, interconnects and memory. The name that the
    driver reports identifies the GPU. This function does not initialize CUDA, because a process that has initialized
    CUDA cannot fork ranks."""
    for about in sorted(drivers.glob("*/information")):
        words = about.read_text().lower().replace("-", " ").split()
        for name in device_names():
            if name in words:
                return read_device(name)
    return read_device(DEFAULT_DEVICE)


class Choice(NamedTuple):
    """Parallel layout for a number of ranks, and its predicted step time in seconds. The time is infinite if the
    planner cannot predict it."""

    seconds: float
    ranks: int
    layout: Layout


def smaller_layout(config: RunConfig, ranks: int, device: DeviceFile) -> Choice | None:
    """Return the fastest legal layout for at most `ranks` ranks; None if no layout is legal. `config` is the run's
    configuration with all defaults filled in. This configuration may be for any number of ranks."""
    until = time.monotonic() + SEARCH
    found = list(islice(_with_fewer_replicas(config, ranks, device), 1))
    searched = 0
    for size in range(ranks, 0, -1):
        if time.monotonic() > until or searched == SIZES:
            break
        best = _fastest(SearchedRun(config, size), device, until)
        if best is not None:
            searched += 1
            found.append(Choice(best.step.seconds, size, best.layout))
    if not found:
        found = list(islice(_legal(config, ranks), 1))
    return min(found, key=lambda each: (each.seconds, -each.ranks), default=None)


def config_in(config: RunConfig, ranks: int, layout: Layout) -> RunConfig:
    """Return the configuration of a run under a different layout, with all defaults filled in."""
    return SearchedRun(config, ranks).with_layout(layout)


def flags_of(config: RunConfig, ranks: int, layout: Layout) -> str:
    """Return the flags that select a layout, as text for messages."""
    return " ".join(SearchedRun(config, ranks).flags(config_in(config, ranks, layout)))


def layout_text(layout: Layout) -> str:
    """Serialize a layout to text for the store."""
    return json.dumps(layout)


def layout_from(text: str) -> Layout:
    """Restore a layout from the text that `layout_text` returned."""
    family, pipeline, dp, saving = json.loads(text)
    return Layout(Family(*family), Pipeline(*pipeline), dp, Saving(*saving))


def _with_fewer_replicas(config: RunConfig, ranks: int, device: DeviceFile) -> Iterator[Choice]:
    """Yield the layout that the run's flags describe, with fewer data-parallel replicas. There is one choice for each
    number of ranks that permits this layout, with the largest number first."""
    for size in range(ranks, 0, -1):
        run = SearchedRun(config, size)
        with suppress(ValueError):  # `size` is not a multiple of the model-parallel sizes
            layout = run.own_layout
            own = run.with_layout(layout)
            if not validate(own, size):
                yield Choice(_seconds(run, own, device), size, layout)


def _seconds(run: SearchedRun, config: RunConfig, device: DeviceFile) -> float:
    try:
        return LayoutCosts(run, device, device.ranks_of_node(run.world_size)).step(config).seconds
    except ValueError:
        return inf


def _legal(config: RunConfig, ranks: int) -> Iterator[Choice]:
    """Yield layouts that pass validation, for runs whose step time the planner cannot predict."""
    for size in range(ranks, 0, -1):
        run = SearchedRun(config, size)
        every = (layout for family in run.space.families() for layout in run.space.layouts(family))
        for layout in islice(every, LISTED):
            if not validate(run.with_layout(layout), size):
                yield Choice(inf, size, layout)


def _fastest(run: SearchedRun, device: DeviceFile, until: float) -> Found | None:
    """Search until the time `until`, and return the fastest layout found; None if the search finds no layout."""

    def look(effort: Effort) -> None:
        if time.monotonic() > until:
            search.end_early()

    costs = LayoutCosts(run, device, device.ranks_of_node(run.world_size))
    search = LayoutSearch(costs, int(device.memory_gib * GIB), FAMILIES, look)
    try:
        return next(iter(search.best(1)), None)
    except ValueError:  # the planner cannot predict the step time of this run
        return None
