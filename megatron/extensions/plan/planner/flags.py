"""Define the command-line options of plans, searches and rehearsals, and the interface through which extensions add
sections to plans.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from megatron.extensions.plan.planner.failures.expected import Expected
from megatron.training.config.commands import COMMANDS, Option
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS

PLANNER = "megatron.extensions.plan.planner"

COMMANDS.register(
    "planner",
    f"{PLANNER}.commands:command_of",
    options={
        "--dry-run": Option("Validate, print the plan of the run, and exit.", command=True),
        "--json": Option(
            "With --dry-run or --rehearse: also write the plan or report, with the resolved configuration, to FILE; "
            "without FILE, print only this JSON to standard output.",
            "[FILE]",
            json=True,
        ),
        "--device": Option(
            "With --dry-run: predict the step time on a100, h100, h200, b200, rtx4090 or another device of "
            "extensions/plan/planner/devices, or on the device that FILE.yaml describes.",
            "NAME",
        ),
        "--gpus-per-node": Option(
            "With --device: ranks per node, which must divide the number of ranks; default: the number in the device "
            "file or, if the job has several nodes, the largest number up to it that divides the number of ranks.",
            "INT",
        ),
        "--suggest": Option(
            "With --dry-run and --device: report whether the given layout fits and how long a step takes, and search "
            "for the fastest layouts that fit; with all, search until no other layout can be faster.",
            "[WORD]",
        ),
        "--rehearse": Option(
            "Run one step as ranks of a larger world, on fake tensors, and report what would fail.",
            command=True,
        ),
        "--ranks": Option("With --rehearse: all-distinct (the default), all, or ranks such as 0,8,16-23.", "WORD"),
        "--device-memory": Option(
            "Memory limit in GiB: the plan of --dry-run and the layouts of --suggest must fit it, and ranks of "
            "--rehearse that exceed it run out of memory; default for plans: the memory in the device file.",
            "FLOAT",
        ),
        "--failures-per-gpu-day": Option(
            "With --device: failures per device and day, such as 5e-4, the rate of Llama 3's training; the plan then "
            "includes the expected goodput, the best --save-interval, and the best number of spare nodes.",
            "FLOAT",
        ),
        "--restart-seconds": Option(
            "With --failures-per-gpu-day: seconds from a failure to the next step; default: 120.", "FLOAT"
        ),
        "--save-seconds": Option(
            "With --failures-per-gpu-day: seconds that a save takes; default: the median of the saves in --save, or an "
            "estimate from an assumed storage rate.",
            "FLOAT",
        ),
        "--repair-hours": Option(
            "With --failures-per-gpu-day: hours until a failed node can be used again; default: 4.", "FLOAT"
        ),
    },
)
CALLBACKS.register("plan of the memory", f"{PLANNER}.callback:PlanOfRun")


@dataclass(frozen=True)
class PlannedRun:
    """Planned run, as passed to the functions that yield plan sections."""

    config: RunConfig
    """Configuration of the run's longest phase."""

    world_size: int

    ranks_per_node: int
    """Number of ranks per node, as given by --gpus-per-node or by the device file. If neither states this number, the
    default is the largest divisor of the world size that is at most 8."""

    step_seconds: float | None
    """Predicted step time in seconds; None without --device."""

    network: float | None
    """Bandwidth in bytes per second between a node and the other nodes; None without --device."""

    host: float | None = None
    """Bandwidth in bytes per second from a device to its host's memory; None without --device."""

    expected: Expected | None = None
    """Expected cost of failures; None without --failures-per-gpu-day."""


class Section(Protocol):
    """Function that yields the lines of a plan section."""

    def __call__(self, run: PlannedRun) -> Iterable[str]: ...


@runtime_checkable
class PlansSection(Protocol):
    """Interface of a flag class whose extension adds a section to plans. The section follows the planner's sections."""

    def plan_section(self, config: RunConfig) -> tuple[str, str] | None:
        """Return the title of the section and the `package.module:name` of its `Section` function; None if the flags do
        not request the section."""
