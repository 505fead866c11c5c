"""The data sets of a dry run, and the files that a run of it would miss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.data import DatasetConfig
from megatron.core.dist_checkpointing.path_kind import Kind, kind_of, reader_of
from megatron.core.parts import DATA_READERS
from megatron.training.config.flags import dashed
from megatron.training.config.output_paths import unwritable
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata
from megatron.training.plan import Phase, RunPlan, plan_class


def data_lines(plan: RunPlan, phase: Phase) -> Iterator[str]:
    """The data sets of the training split in a phase as they are on this machine."""
    from megatron.core.datasets.sources import source_lines

    config, data = phase.config, phase.config.data
    yield from plan.lines(phase)
    if data.dataset != "gpt":
        yield "synthetic" if data.dataset == "mock" else f"--dataset-type {data.dataset}"
        return
    samples = None
    if phase.end is not None:
        end = plan.sizes.samples(plan.iterations) if phase == plan.phases[-1] else phase.end
        samples = end - phase.first_sample
    yield from source_lines(data, samples, config.model.seq_length, _other_line)


def missing_inputs(config: RunConfig) -> Iterator[Problem]:
    """A problem for each file that a run of a resolved configuration needs and a plan does not: output folders that
    cannot be written, data sets that are not there, a checkpoint to load."""
    yield from unwritable(config)
    options, (plan, _) = config.checkpoint, plan_class(config).planned(config)
    sets = [phase.config.data for phase in plan.phases] if plan is not None else []
    yield from dict.fromkeys(problem for data in sets for problem in _missing_data(data))
    for field in ("finetune", "exit_on_missing_checkpoint"):
        load = Path(options.load) if options.load and getattr(options, field) else None
        if load is not None and saved_metadata(load) is None and kind_of(load) is not Kind.HUGGING_FACE:
            rule, remedy = (
                f"holds no checkpoint, and {dashed(field)} needs one",
                f"correct the path, or drop {dashed(field)}",
            )
            yield Problem("--load", options.load, rule, remedy)


def _missing_data(data: DatasetConfig) -> Iterator[Problem]:
    from megatron.core.datasets.build import parse_blend, split_share
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid"):
        flag, words = dashed(field), getattr(data, field) or ()
        words = [word.partition("=")[2] for word in words] if field == "valid" else words
        try:
            paths = [split_share(prefix)[0] for prefix in parse_blend(flag, words).prefixes] if words else []
        except ValueError:  # a rule reports it
            continue
        for path in paths if data.dataset == "gpt" else ():
            try:
                reader = reader_of(path)
                IndexedDataset(path) if reader is None else DATA_READERS[reader].describe(flag, path)
            except ValueError as error:
                yield Problem.of_message(flag, path, str(error))
            except OSError as error:
                yield Problem(flag, path, str(error), "correct the path")


def _other_line(path: str) -> str | None:
    """What is said of files that have no tokens yet; None for an indexed dataset."""
    if (reader := reader_of(path)) is None:
        return None
    try:
        line: str = DATA_READERS[reader].describe("--data-path", path)
    except ValueError as error:
        return str(error)
    return line
