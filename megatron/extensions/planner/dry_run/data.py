"""The data sets of a dry run, and the files that a run of it would miss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.config.data import DatasetConfig
from megatron.core.dist_checkpointing.path_kind import TEXTS, kind_of
from megatron.core.parts import MODEL_LOADERS
from megatron.extensions.phases.plan import Stage, StagePlan, plan_stages
from megatron.extensions.phases.printed import stage_lines
from megatron.training.config.flags import dashed
from megatron.training.config.output_paths import unwritable
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.config.saved_flags import saved_metadata


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


def missing_inputs(config: RunConfig) -> Iterator[Problem]:
    """A problem for each file that a run of a resolved configuration needs and a plan does not: output folders that
    cannot be written, data sets that are not there, a checkpoint to load."""
    yield from unwritable(config)
    options, sets = config.checkpoint, [config.data]
    if config.data.data_stages is not None:
        plan, _ = plan_stages(config)
        sets = [stage.config.data for stage in plan.stages] if plan is not None else []
    yield from dict.fromkeys(problem for data in sets for problem in _missing_data(data))
    for field in ("finetune", "exit_on_missing_checkpoint"):
        load = Path(options.load) if options.load and getattr(options, field) else None
        if load is not None and saved_metadata(load) is None and kind_of(load) not in MODEL_LOADERS:
            rule, remedy = (
                f"holds no checkpoint, and {dashed(field)} needs one",
                f"correct the path, or drop {dashed(field)}",
            )
            yield Problem("--load", options.load, rule, remedy)


def _missing_data(data: DatasetConfig) -> Iterator[Problem]:
    from megatron.core.datasets.build import parse_blend, split_share
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from megatron.extensions.text_data.inputs import find_inputs

    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "valid"):
        flag, words = dashed(field), getattr(data, field) or ()
        words = [word.partition("=")[2] for word in words] if field == "valid" else words
        try:
            paths = [split_share(prefix)[0] for prefix in parse_blend(flag, words).prefixes] if words else []
        except ValueError:  # a rule reports it
            continue
        for path in paths if data.dataset == "gpt" else ():
            try:
                find_inputs([path], flag) if kind_of(path) in TEXTS else IndexedDataset(path)
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
