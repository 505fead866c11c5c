"""Search for the layout with which a run continues on fewer ranks and the same global batch: the fastest layout that
fits in memory, as the planner predicts. This module does not import torch.

If the planner has no rates for the device, as on CPUs, it ranks layouts by the rates of an H100. The layout of the
run's own flags, with fewer replicas, is one of the candidates.
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
"""Seconds after which a search ends with the best layout found so far."""

FAMILIES = 8
"""Number of layout families that are timed."""

SIZES = 3
"""Number of world sizes that are compared, from the largest with a legal layout down. The fastest is used."""

LISTED = 200
"""Largest number of layouts of one size that are validated until one is legal."""

DEFAULT_DEVICE = "h100"


def device_here(drivers: Path = Path("/proc/driver/nvidia/gpus")) -> DeviceFile:
    """Return the planner's rates for this machine's GPU, found by the name that the driver reports. CUDA is not
    initialized, because a process that has initialized it cannot fork ranks."""
    for about in sorted(drivers.glob("*/information")):
        words = about.read_text().lower().replace("-", " ").split()
        for name in device_names():
            if name in words:
                return read_device(name)
    return read_device(DEFAULT_DEVICE)


class Choice(NamedTuple):
    """Layout for a number of ranks, with the predicted seconds of a step; infinite if there is no prediction."""

    seconds: float
    ranks: int
    layout: Layout


def smaller_layout(config: RunConfig, ranks: int, device: DeviceFile) -> Choice | None:
    """Return the number of ranks, at most `ranks`, and the layout with which a run continues fastest; None if none is
    legal. `config` is resolved, for any number of ranks."""
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
    """Return the resolved configuration of a run with another layout."""
    return SearchedRun(config, ranks).with_layout(layout)


def flags_of(config: RunConfig, ranks: int, layout: Layout) -> str:
    """Return the flags of a layout, for messages."""
    return " ".join(SearchedRun(config, ranks).flags(config_in(config, ranks, layout)))


def layout_text(layout: Layout) -> str:
    """Return a layout as text for the store."""
    return json.dumps(layout)


def layout_from(text: str) -> Layout:
    """Parse a text that `layout_text` has written."""
    family, pipeline, dp, saving = json.loads(text)
    return Layout(Family(*family), Pipeline(*pipeline), dp, Saving(*saving))


def _with_fewer_replicas(config: RunConfig, ranks: int, device: DeviceFile) -> Iterator[Choice]:
    """Yield the run's own layout at every number of ranks at which it is legal, the largest first."""
    for size in range(ranks, 0, -1):
        run = SearchedRun(config, size)
        with suppress(ValueError):  # its sizes do not divide these ranks
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
    """Yield layouts that pass validation, for runs whose step time cannot be predicted."""
    for size in range(ranks, 0, -1):
        run = SearchedRun(config, size)
        every = (layout for family in run.space.families() for layout in run.space.layouts(family))
        for layout in islice(every, LISTED):
            if not validate(run.with_layout(layout), size):
                yield Choice(inf, size, layout)


def _fastest(run: SearchedRun, device: DeviceFile, until: float) -> Found | None:
    """Return the fastest layout that the search finds before the time `until`; None if it finds none."""

    def look(effort: Effort) -> None:
        if time.monotonic() > until:
            search.end_early()

    costs = LayoutCosts(run, device, device.ranks_of_node(run.world_size))
    search = LayoutSearch(costs, int(device.memory_gib * GIB), FAMILIES, look)
    try:
        return next(iter(search.best(1)), None)
    except ValueError:  # the planner cannot predict such a step
        return None
