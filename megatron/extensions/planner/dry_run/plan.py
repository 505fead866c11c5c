"""Prints the plan of a run without starting it: no GPU and no process group. torch is imported only to measure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.extensions.planner.device_file import DeviceFile, read_device
from megatron.training.config.run_config import RunConfig

if TYPE_CHECKING:
    from megatron.extensions.planner.time.step_time import StepTime

from collections.abc import Collection, Sequence

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.planner.dry_run.description import batch_lines, data_lines, model_lines
from megatron.extensions.planner.dry_run.memory import GIB, RANKS_SHOWN, Fit, fullest, memory_lines, memory_of_ranks
from megatron.training.config.flags import flat_values
from megatron.training.config.foreign_flags import DIFFERENCES
from megatron.training.config.output_files import write_json
from megatron.training.config.problem import Problem
from megatron.training.plan import plan_of


class DeviceError(ValueError):
    """A device file lacks what a step needs."""


@dataclass(frozen=True)
class PredictedStep:
    """A predicted step on a kind of device."""

    time: StepTime
    device: DeviceFile
    world_size: int
    gpus_per_node: int

    @property
    def record(self) -> dict[str, Any]:
        """As JSON: seconds and shares."""
        time = self.time
        return {
            "device": self.device.name,
            "gpus_per_node": self.gpus_per_node,
            "seconds": time.seconds,
            "tokens_per_second": time.tokens_per_second,
            "tokens_per_second_per_device": time.tokens_per_second / self.world_size,
            "tflops": time.tflops,
            "mfu": time.mfu,
            "bubble": time.bubble,
            "bound_by": time.bound_by,
            "parts_of_pp_rank": time.parts_of_pp_rank,
            "parts": time.parts,
        }


def predicted_step(config: RunConfig, world_size: int, device: str, gpus_per_node: int | None) -> PredictedStep:
    """Predicts a step on the device of a file. Raises DeviceError."""
    from megatron.extensions.planner.time.step_time import predict_step

    speeds = read_device(device)
    nodes = gpus_per_node or speeds.ranks_of_node(world_size)
    try:
        return PredictedStep(predict_step(config, world_size, speeds, nodes), speeds, world_size, nodes)
    except ValueError as error:
        raise DeviceError(str(error)) from error


def step_lines(step: PredictedStep) -> Iterator[str]:
    """Speed, what bounds it, and what the time is spent on."""
    time = step.time
    yield f"{step.device.name}, {step.gpus_per_node} a node: every figure is predicted, none is measured"
    mfu = share_text(time.mfu)
    yield (
        f"{time.seconds:.4g} s a step, {time.tokens_per_second / step.world_size:,.0f} tokens/s a device, "
        f"{time.tflops:.4g} TFLOP/s a device (causal), MFU {mfu} (causal), bound by {_title(time.bound_by)}"
    )
    if time.parts_of_pp_rank is not None:
        yield f"bubble {time.bubble:.1%} of the step by these times, the mean of the pipeline ranks"
        yield f"the time of pp {time.parts_of_pp_rank}, which has most work:"
    for subject, seconds in sorted(time.parts.items(), key=lambda part: -part[1]):
        if seconds:
            yield f"    {_title(subject):<22}{1e3 * seconds:>12,.1f} ms{seconds / time.seconds:>8.1%}"


def share_text(share: float | None) -> str:
    """In percent, or that it is not known."""
    return "unknown" if share is None else f"{share:.1%}"


def _title(subject: str) -> str:
    return subject.replace("_", " ").replace("tp ", "TP ").replace("cp ", "CP ").replace("ep ", "EP ")


__all__ = ["DeviceError", "print_plan"]


def print_plan(
    config: RunConfig,
    world_size: int,
    plan_file: str | None = None,
    device: str | None = None,
    gpus_per_node: int | None = None,
    device_memory: float | None = None,
    given: Collection[str] = (),
    problems: Sequence[Problem] = (),
) -> None:
    """Prints what a resolved and validated configuration will build and do on `world_size` ranks, and with a `device`
    the predicted time of a step. Says whether it fits devices of `device_memory` GiB, by default those of `device`, and
    which differences from other programs it meets with the flags as `given`.

    Writes the same to `plan_file` as JSON: "world_size", "config" with every field by its flat name, the lines of the
    "plan" under their titles, "memory" of each pipeline rank in bytes, "time" (`StepTime`), and of the fit
    "device_memory" in bytes, "fits", "fullest_pp_rank" and "bytes_over"; also `problems`, those of files that a run
    misses, which the caller tells. If it is "" the JSON is all that is printed.
    Raises OutputError if it cannot be written, DeviceError if no step of this kind can be predicted.
    """
    dims = ParallelDims.from_config(config.parallel, world_size)
    run = plan_of(config)
    largest = run.longest.config
    of = f" in phase {run.longest.name}, the largest" if len(run.phases) > 1 else ""
    step = predicted_step(largest, world_size, device, gpus_per_node) if device is not None else None
    memory = memory_of_ranks(largest, dims)
    size = device_memory or (step.device.memory_gib if step is not None else None)
    fit = None if size is None else Fit(fullest(memory), int(size * GIB))
    fits = [] if fit is None else [fit.line]
    plan: dict[str, list[str]] = {}
    for title, lines in (
        ("Model", model_lines(config)),
        (f"Groups, world size {world_size}", group_lines(dims)),
        (
            f"Pipeline stages and memory of each rank{of}",
            [*memory_lines(largest, dims, memory), *fits],
        ),
        ("Batch and length", batch_lines(run, dims)),
        ("Data", [line for phase in run.phases for line in data_lines(run, phase)]),
        (f"Predicted step{of}", step_lines(step) if step is not None else ()),
        *((f"Different from {name}", DIFFERENCES[name](config, given)) for name in DIFFERENCES),
    ):
        if not (found := list(lines)):
            continue
        plan[title] = found
        if plan_file != "":
            print("\n".join([title, *(f"  {line}" for line in found)]))
    if plan_file is not None:
        record: dict[str, Any] = {"world_size": world_size, "config": flat_values(config), "plan": plan}
        record["memory"] = [rank.record for rank in memory]
        if fit is not None:
            record |= {"device_memory": fit.limit, **fit.record}
        if step is not None:
            record["time"] = step.record
        if problems:
            record["problems"] = [each.record for each in problems]
        write_json(record, plan_file)


GROUPS_SHOWN = 4

MOST_LISTED = 2**17
"""Ranks up to which groups are listed: their lists take seconds."""


def group_lines(dims: ParallelDims) -> Iterator[str]:
    """The groups along each axis that is cut."""
    axes = [("TP", "tp"), ("CP", "cp"), ("DP", "dp"), ("PP", "pp"), ("EP", "ep")]
    if dims.ep > 1 or dims.expt_tp != dims.tp:
        axes += [("ETP", "expt_tp"), ("EDP", "expt_dp")]  # tensor and data parallelism of the experts
    yield ", ".join(f"{name} {dims.size(axis)}" for name, axis in axes)
    for name, axis in axes:
        size = dims.size(axis)
        if size > 1 and dims.world_size > MOST_LISTED:
            yield f"{name} {dims.world_size // size} groups of {size}; above {MOST_LISTED:,} ranks they are not listed"
        elif size > 1:
            groups = dims.groups(axis)
            shown = " ".join(_ranks(group) for group in groups[:GROUPS_SHOWN])
            more = f" ... {_ranks(groups[-1])}" if len(groups) > GROUPS_SHOWN else ""
            yield f"{name} {len(groups)} groups of {size}: {shown}{more}"


def _ranks(group: tuple[int, ...]) -> str:
    """`[0,1]`, and for many ranks the first few and the last."""
    if len(group) <= RANKS_SHOWN:
        return "[" + ",".join(map(str, group)) + "]"
    return "[" + ",".join(map(str, group[:3])) + f",...,{group[-1]}]"
