"""The data sets of a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.dist_checkpointing.path_kind import reader_of
from megatron.core.parts import DATA_READERS
from megatron.training.plan import Phase, RunPlan


def data_lines(plan: RunPlan, phase: Phase) -> Iterator[str]:
    """The data sets of the training split in a phase as they are on this machine."""
    from megatron.core.datasets.build import source_lines

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


def _other_line(path: str) -> str | None:
    """What is said of files that have no tokens yet; None for an indexed dataset."""
    if (reader := reader_of(path)) is None:
        return None
    try:
        line: str = DATA_READERS[reader].describe("--data-path", path)
    except ValueError as error:
        return str(error)
    return line
