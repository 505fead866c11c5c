"""Parse and run the commands --dry-run, --suggest and --rehearse. torch is imported only when a command runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from megatron.core.parallel_dims import ParallelDims
from megatron.extensions.plan.planner.device_file import DeviceError, device_names, read_device
from megatron.extensions.plan.planner.failures.expected import AskedFailures
from megatron.extensions.plan.planner.rehearsal.matching import DISTINCT, chosen_ranks
from megatron.extensions.plan.planner.terminal import at_interrupt, end_process
from megatron.training.config.commands import Command, GivenOptions, Prepared
from megatron.training.config.input_files import absent_checkpoint, missing_inputs
from megatron.training.config.problem import Problem, path_rule


def command_of(given: GivenOptions, world_size: int | None) -> Command | None:
    """Return the command (`DryRun` or `Rehearsal`) that the options request; None if they request neither. Invalid
    options are recorded as problems."""
    plans, rehearses = "--dry-run" in given.options, "--rehearse" in given.options
    to_plan = "replace --rehearse by --dry-run" if rehearses else "add --dry-run"
    device, gpus_per_node = _device(given, to_plan)
    suggest = given.last("--suggest")
    json_file = given.last("--json")
    memory, failures = _device_memory(given), _failures(given, device)
    if suggest not in (None, "", "all"):
        rule, remedy = (
            "must be all or have no value",
            "use --suggest, or --suggest all to search until no layout can be faster",
        )
        given.problems.append(Problem("--suggest", suggest, rule, remedy))
    if suggest is not None and (device is None or not plans):
        missing = [] if plans else [to_plan]
        missing += [] if device else [f"add --device, one of {', '.join(device_names())}"]
        given.problems.append(Problem("--suggest", None, "searches by predicted times", ", and ".join(missing)))
    if json_file is not None and not (plans or rehearses):
        rule = "writes the plan of --dry-run or the report of --rehearse, but neither is given"
        given.problems.append(Problem("--json", json_file or None, rule, "add --dry-run"))
    elif json_file and not _can_write(Path(json_file)):
        rule, remedy = "cannot be written", "name a file in an existing, writable folder"
        given.problems.append(Problem("--json", json_file, rule, remedy))
    if gpus_per_node and world_size and world_size > gpus_per_node and world_size % gpus_per_node:
        rule = (
            f"does not divide the {world_size} ranks: predictions assume that all nodes hold the same number of ranks"
        )
        near = next(size for size in range(gpus_per_node, 0, -1) if world_size % size == 0)
        given.problems.append(Problem("--gpus-per-node", gpus_per_node, rule, f"nearest: {near}"))
    ranks = given.last("--ranks")
    if rehearses:
        return (
            DryRun(device, gpus_per_node, suggest, memory, failures) if plans else Rehearsal(ranks or DISTINCT, memory)
        )
    if ranks is not None:
        given.problems.append(Problem("--ranks", ranks, "has no effect without a rehearsal", "add --rehearse"))
    return DryRun(device, gpus_per_node, suggest, memory, failures) if plans else None


def _can_write(path: Path) -> bool:
    """Return True if the file is writable. This function is called before a long search starts, so that the result of
    the search is not lost."""
    if path_rule("local", str(path)) is not None:
        return False
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def _device(given: GivenOptions, to_plan: str) -> tuple[str | None, int | None]:
    """Parse --device and --gpus-per-node; record invalid values as problems. `to_plan` is a text for error messages:
    the remedy that turns the user's command into a dry run."""
    device, gpus_per_node = (
        given.last("--device"),
        given.number("--gpus-per-node", "pass the number of ranks that share a node"),
    )
    if gpus_per_node is not None and device is None:
        rule, remedy = (
            "describes the nodes of --device, but --device is not given",
            f"add --device, {', '.join(device_names())}",
        )
        given.problems.append(Problem("--gpus-per-node", gpus_per_node, rule, remedy))
    if device is not None and "--dry-run" not in given.options:
        given.problems.append(Problem("--device", device, "needs --dry-run, which predicts", to_plan))
    elif device is not None:
        try:
            read_device(device)
        except (ValueError, OSError) as error:
            remedy = f"use one of {', '.join(device_names())}, or a device file"
            given.problems.append(Problem("--device", device, str(error), remedy))
    return device, gpus_per_node


def _device_memory(given: GivenOptions) -> float | None:
    """Parse --device-memory in GiB; record an invalid value as a problem."""
    name = "--device-memory"
    if given.last(name) is not None and not {"--rehearse", "--dry-run"} & set(given.options):
        rule, remedy = "has no effect without a plan or a rehearsal", "add --dry-run or --rehearse"
        given.problems.append(Problem(name, given.last(name), rule, remedy))
    return _above_zero(given, name, "pass the memory of a device in GiB, such as 80")


def _failures(given: GivenOptions, device: str | None) -> AskedFailures | None:
    """Parse --failures-per-gpu-day and its dependent options; record invalid values as problems."""
    name = "--failures-per-gpu-day"
    remedies = {
        "--restart-seconds": "pass the number of seconds from a failure to the next step, such as 120",
        "--save-seconds": "pass the duration of a save in seconds, such as 30",
        "--repair-hours": "pass the number of hours until a failed node can be used again, such as 4",
    }
    if given.last(name) is None:
        for option in remedies:
            if (text := given.last(option)) is not None:
                given.problems.append(
                    Problem(
                        option, text, "has no effect without a failure rate", f"add {name}, for example {name} 5e-4"
                    )
                )
        return None
    if device is None or given.last("--suggest") is not None:
        rule = "needs the predicted step time of a single layout"
        remedy = f"add --device, one of {', '.join(device_names())}" if device is None else "remove --suggest"
        given.problems.append(Problem(name, given.last(name), rule, remedy))
    rate = _above_zero(given, name, "pass the number of failures per device and day, such as 5e-4")
    restart, save, repair = (_above_zero(given, option, remedy) for option, remedy in remedies.items())
    return None if rate is None else AskedFailures(rate, restart, save, repair)


def _above_zero(given: GivenOptions, name: str, remedy: str) -> float | None:
    """Parse the value of an option as a number above 0; record any other value as a problem."""
    if (text := given.last(name)) is None:
        return None
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if 0 < size < float("inf"):
        return size
    given.problems.append(Problem(name, text, "must be a number above 0", remedy))
    return None


@dataclass(frozen=True)
class DryRun(Command):
    """Command that prints the plan of a run or, with --suggest, the best layouts for the run."""

    reads_data: ClassVar[bool] = False

    device: str | None = None
    """Name of the device for which the step time is predicted."""

    gpus_per_node: int | None = None
    suggest: str | None = None
    """Value of --suggest, either "" or "all"; None if no search is requested."""

    device_memory: float | None = None
    """Memory of a device in GiB, which the plan and all suggested layouts must fit."""

    failures: AskedFailures | None = None

    def note(self, world_size: int) -> str | None:
        """Return a note if a search takes the number of ranks from the flags instead of --world-size."""
        if self.suggest is None:
            return super().note(world_size)
        remedy = "add --world-size, the number of ranks of the cluster"
        return f"--suggest searches layouts of {world_size} ranks, the number that the flags require; {remedy}"

    def run(self, run: Prepared) -> int:
        """Print the plan or the suggested layouts. If the only problems are missing files that a plan does not need,
        print the plan first, and then the problems."""
        try:
            whole = self.suggest is not None and run.config.training.global_batch_size
            return self._suggest(run) if whole else self._plan(run)
        except DeviceError as error:
            run.refuse(Problem.of_errors("--device", self.device, error))

    def _plan(self, run: Prepared) -> int:
        from megatron.core.pipeline_parallel.stage_parameters import stage_metas
        from megatron.extensions.plan.planner.dry_run import print_plan

        inputs = [*run.inputs, *missing_inputs(run.config, run.problems)]
        if run.problems:
            run.refuse([*run.problems, *inputs])
        # The folder may exist only on the cluster, or an earlier job may create it, so only the run itself checks for
        # it.
        absent = [each for each in inputs if each == absent_checkpoint(run.config)]
        inputs = [each for each in inputs if each not in absent]
        if run.launch.rank == 0:
            for each in absent:
                print(each, file=sys.stderr)
            if run.config.optimizer.parameter_rules:  # a real run would detect this while it builds the model
                try:
                    run.config.optimizer.check_rules(stage_metas(run.config.model))
                except ValueError as error:
                    run.refuse(Problem.of_errors("--freeze", None, error))
            print_plan(run, self.device, self.gpus_per_node, self.device_memory, inputs, self.failures)
        if inputs:
            run.refuse(inputs, json=False)
        return 0

    def _suggest(self, run: Prepared) -> int:
        """Print the best layouts of a run.

        If the run's own layout has problems, the report lists them. If every layout has problems, the run is refused in
        the same way as without --suggest: the message states the problems of the run's own layout."""
        from megatron.extensions.plan.planner.suggest.report import MOST_TIMED, print_suggestions

        assert self.device is not None, "--suggest comes with --device"
        if run.launch.rank == 0:
            asked = self.device, self.gpus_per_node, self.device_memory, None if self.suggest == "all" else MOST_TIMED
            try:
                if not print_suggestions(run, *asked) and run.problems:
                    run.refuse(run.problems)
            except KeyboardInterrupt:
                return 130
        return 0


@dataclass(frozen=True)
class Rehearsal(Command):
    """Command that rehearses the ranks of a larger world on this machine."""

    reads_data: ClassVar[bool] = False

    ranks: str = DISTINCT
    device_memory: float | None = None
    """Memory limit of a rank in GiB."""

    def run(self, run: Prepared) -> int:
        """Rehearse the requested ranks on this machine, and print the report."""
        if run.launch.rank == 0:
            print(*run.inputs, sep="\n", end="\n" if run.inputs else "", file=sys.stderr)
        problems = [*run.problems, *self._wrong_ranks(run)]
        if problems:
            run.refuse([*problems, *run.inputs])
        if run.launch.rank > 0:
            return 0
        from megatron.extensions.plan.planner.rehearsal.command import rehearse

        with at_interrupt(end_process):
            return rehearse(run, self.ranks, self.device_memory)

    def _wrong_ranks(self, run: Prepared) -> list[Problem]:
        try:
            chosen_ranks(self.ranks, ParallelDims.from_config(run.config.parallel, run.world_size))
        except ValueError as error:
            return [Problem.of_message("--ranks", self.ranks, str(error))] if str(error).startswith("--ranks") else []
        return []
