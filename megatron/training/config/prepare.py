"""From a command line to a configuration that can run, or to every problem with it at once. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

from megatron.core.parallel_dims import ParallelDims
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.planner.dry_run.data import missing_inputs
from megatron.extensions.planner.dry_run.step import DeviceError
from megatron.extensions.planner.rehearsal.ranks import chosen_ranks
from megatron.training.config.arguments import CommandLine, print_problems
from megatron.training.config.data_lists import with_data_lists
from megatron.training.config.output_files import why_unwritten
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import with_saved_flags
from megatron.training.config.validation import Problem, notices, resolve, validate
from megatron.training.extensions import problem_in_extension
from megatron.training.reliability.launch import Launch

TOKENIZER_FLAGS = {"--tokenizer-type", "--tokenizer-model", "--vocab-file", "--merge-file", "--vocab-size"}
"""Where one of these is wrong there is no tokenizer to read."""


def prepare(command: CommandLine, launch: Launch) -> RunConfig:
    """The resolved configuration for the world this process is in.

    Raises SystemExit: with code 2 after printing every problem, with code 0 after printing the plan of a dry run. Where
    only files are missing that a plan does not need, it is printed before the problems. One rank prints.
    """
    try:
        return _prepared(command, launch)
    except Exception as error:
        if isinstance(error, OSError) and why_unwritten(error) is not None:
            raise
        if (problem := problem_in_extension(error)) is None:
            raise
        _refuse([problem], launch, command.plan_file)


def _prepared(command: CommandLine, launch: Launch) -> RunConfig:
    """`prepare`; errors of an extension's code are raised."""
    world_size = command.world_size or launch.world_size
    try:
        config, notes = with_saved_flags(command.config)
    except (ValueError, OSError) as error:
        _refuse(Problem.of_errors("--load", command.config.checkpoint.load, error), launch, command.plan_file)
    problems: list[Problem] = []
    inputs: list[Problem] = []
    """Those that a plan does not need, and a run does."""
    try:
        config = replace(config, data=with_data_lists(config.data))
    except ValueError as error:
        (problems if command.trains else inputs).extend(Problem.of_errors("--data-path", None, error))
    if launch.rank == 0:
        said = () if command.dry_run else inputs
        for note in (*command.notes, *notes, *said, *notices(config, world_size)):
            print(note, file=sys.stderr)
    vocab_size = None
    if not TOKENIZER_FLAGS & {problem.flag for problem in validate(config, world_size)}:
        try:
            vocab_size = tokenizer_vocabulary(resolve(config, world_size))
        except (ValueError, OSError) as error:
            problems += Problem.of_errors("--tokenizer-type", config.tokenizer.tokenizer_type, error)
    config = resolve(config, world_size, vocab_size)
    problems += validate(config, world_size)
    if command.trains:
        problems += too_short_a_job(config, os.environ)
    if command.dry_run or (command.trains and problems and launch.rank == 0):  # a run that can start says it itself
        wrong = {(problem.flag, problem.value) for problem in problems}  # by itself: told once
        inputs += [problem for problem in missing_inputs(config) if (problem.flag, problem.value) not in wrong]
    if command.rehearsal is not None:
        problems += _wrong_ranks(command.rehearsal.ranks, config, world_size)
    if command.suggest is not None and config.training.global_batch_size:
        _suggest(config, world_size, command, problems, launch)
    if problems:
        _refuse([*problems, *inputs], launch, command.plan_file)
    if command.dry_run:
        if launch.rank == 0:
            if config.optimizer.names_parameters:  # a run finds it out as it builds the model
                _refuse_wrong_names(config, launch, command.plan_file)
            from megatron.extensions.planner.dry_run.plan import print_plan

            try:
                asked = command.device, command.gpus_per_node, command.device_memory, command.given
                print_plan(config, world_size, command.plan_file, *asked, inputs)
            except DeviceError as error:
                _refuse_device(error, launch, command)
        if inputs:
            _refuse(inputs, launch, None)
        raise SystemExit(0)
    return config


def _wrong_ranks(text: str, config: RunConfig, world_size: int) -> list[Problem]:
    try:
        chosen_ranks(text, ParallelDims.from_config(config.parallel, world_size))
    except ValueError as error:
        return [Problem.of_message("--ranks", text, str(error))] if str(error).startswith("--ranks") else []
    return []


def _suggest(
    config: RunConfig, world_size: int, command: CommandLine, problems: Sequence[Problem], launch: Launch
) -> NoReturn:
    """Prints the best layouts of a run. Problems of its own layout are part of what is said of it; where every layout
    has problems, the run's own are told as those of a run."""
    from megatron.extensions.planner.suggest.printed import MOST_PREDICTED, MOST_TIMED, print_suggestions

    assert command.device is not None, "--suggest comes with --device"
    if launch.rank == 0:
        asked = command.device, command.gpus_per_node, command.device_memory, command.plan_file
        try:
            most = (None, None) if command.suggest == "all" else (MOST_PREDICTED, MOST_TIMED)
            if not print_suggestions(config, world_size, *asked, problems, most) and problems:
                _refuse(problems, launch, command.plan_file)
        except DeviceError as error:
            _refuse_device(error, launch, command)
        except KeyboardInterrupt:
            raise SystemExit(130) from None
    raise SystemExit(0)


def _refuse_wrong_names(config: RunConfig, launch: Launch, json_file: str | None) -> None:
    from megatron.extensions.planner.parameters import stage_metas

    try:
        config.optimizer.check_names({meta.name for meta in stage_metas(config.model)})
    except ValueError as error:
        _refuse(Problem.of_errors("--freeze", None, error), launch, json_file)


def _refuse_device(error: DeviceError, launch: Launch, command: CommandLine) -> NoReturn:
    """Refuses a device file that lacks what a step needs. Raises `error` if an extension's code has raised it."""
    if problem_in_extension(error) is not None:
        raise error
    _refuse(Problem.of_errors("--device", command.device, error), launch, command.plan_file)


def _refuse(problems: Sequence[Problem], launch: Launch, json_file: str | None) -> NoReturn:
    if launch.rank == 0:
        print_problems(problems, json_file)
    raise SystemExit(2)


def too_short_a_job(config: RunConfig, environ: Mapping[str, str]) -> list[Problem]:
    """A problem where the SLURM job would be over before it begins, each time that it is put back into the queue."""
    start, end = environ.get("SLURM_JOB_START_TIME"), environ.get("SLURM_JOB_END_TIME")
    margin = config.training.exit_margin_in_mins
    if not (start and end and start.isdigit() and end.isdigit()) or (minutes := (int(end) - int(start)) / 60) > margin:
        return []
    rule = f"must be below {minutes:g}, the minutes that the SLURM job has in all"
    return [Problem("--exit-margin-in-mins", margin, rule, f"{minutes / 4:g}, or a longer --time for the job")]


def tokenizer_vocabulary(config: RunConfig) -> int | None:
    """Tokens of the tokenizer that the flags name; None where they name none."""
    if config.tokenizer.tokenizer_type is None:
        return None
    return build_tokenizer(config.tokenizer, config.model.vocab_size).vocab_size
