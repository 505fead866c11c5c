"""The data sets of a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.training.config.stages.plan import Stage, StagePlan
from megatron.training.config.stages.printed import stage_lines


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


def _text_line(path: str) -> str | None:
    """What is said of text files, which have no tokens yet; None for an indexed dataset."""
    from megatron.core.text_files.inputs import find_inputs
    from megatron.core.text_files.tokenized import is_text

    if not is_text(path):
        return None
    try:
        files = find_inputs([path], "--data-path")
    except ValueError as error:
        return str(error)
    size = sum(file.size for file in files)
    return f"{path}: text, {len(files)} files, {size / 1e6:,.1f} MB, tokenized when the run starts"
