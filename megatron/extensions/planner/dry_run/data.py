"""The data sets of a dry run, and the files of text and of phases that a run of it would miss."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.dist_checkpointing.path_kind import TEXTS, kind_of
from megatron.extensions.phases.plan import Stage, StagePlan, plan_stages
from megatron.extensions.phases.printed import stage_lines
from megatron.training.config.input_files import data_paths, missing_data
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig


def data_lines(stages: StagePlan, stage: Stage) -> Iterator[str]:
    """The data sets of the training split in a stage as they are on this machine."""
    from megatron.core.datasets.sources import source_lines

    config, data = stage.config, stage.config.data
    yield from stage_lines(stages, stage)
    if data.dataset != "gpt":
        yield "synthetic" if data.dataset == "mock" else f"--dataset-type {data.dataset}"
        return
    samples = None
    if stage.end is not None:
        end = stages.sizes.samples(stages.iterations) if stage == stages.stages[-1] else stage.end
        samples = end - stage.first_sample
    yield from source_lines(data, samples, config.model.seq_length, _text_line)


def missing_in_phases(config: RunConfig) -> Iterator[Problem]:
    """A problem for each file of text, and of the data of each phase, that a run needs and that is not there."""
    from megatron.extensions.text_data.inputs import find_inputs

    sets = [config.data]
    if config.data.data_stages is not None:
        plan, _ = plan_stages(config)
        sets = [stage.config.data for stage in plan.stages] if plan is not None else []
    for data in sets:
        yield from missing_data(data)
        for flag, path in data_paths(data):
            try:
                if kind_of(path) in TEXTS:
                    find_inputs([path], flag)
            except ValueError as error:
                yield Problem.of_message(flag, path, str(error))
            except OSError as error:
                yield Problem(flag, path, str(error), "correct the path")


def _text_line(path: str) -> str | None:
    """What is said of text files, which have no tokens yet; None for an indexed dataset."""
    from megatron.extensions.text_data.inputs import find_inputs

    if kind_of(path) not in TEXTS:
        return None
    try:
        files = find_inputs([path], "--data-path")
    except ValueError as error:
        return str(error)
    size = sum(file.size for file in files)
    return f"{path}: text, {len(files)} files, {size / 1e6:,.1f} MB, tokenized when the run starts"
