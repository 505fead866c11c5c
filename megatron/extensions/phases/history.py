"""What a checkpoint says of the stages that its run has begun, and the plan of a run that resumes from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.path_kind import kind_of
from megatron.core.parts import MODEL_LOADERS
from megatron.extensions.phases.plan import StagePlan, values_of
from megatron.training.config.batch_size import BatchSizes, samples_of_run
from megatron.training.config.flags import config_of_sections, field_table
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.config.saved_flags import saved_metadata


@dataclass(frozen=True)
class History:
    """The stages that a run has begun."""

    consumed_samples: int
    stages: list[dict[str, Any]]
    """As `StagePlan.record` makes them."""


def read_history(options: CheckpointConfig) -> History | None:
    """That of the checkpoint a run resumes from; None if it starts at sample 0, or with other data.

    Raises ValueError if no checkpoint can be read."""
    if options.load is None or options.finetune or options.reset_iteration or options.override_data_fingerprint:
        return None
    load = Path(options.load)
    if kind_of(load) in MODEL_LOADERS:
        load = Path(options.save or options.load)
    metadata = saved_metadata(load)
    if metadata is None or not metadata.get("consumed_samples"):
        return None
    stages = metadata.get("stages")
    if stages is None:  # of a version without stages
        config = config_of_sections(metadata["config"])
        samples = samples_of_run(config)
        if config.training.train_iters is not None and config.training.global_batch_size:
            samples = BatchSizes.from_config(config).samples(config.training.train_iters)
        stages = [{"name": "", "first_sample": 0, "planned": [samples] if samples else [], "values": None}]
    return History(int(metadata["consumed_samples"]), stages)


def continued(plan: StagePlan, history: History | None) -> StagePlan:
    """The plan with the earlier plans of the stages that have begun, whose order of samples stays.

    Raises ValueError, with every problem, if one of them has become another."""
    if history is None:
        return plan
    if problems := list(_changes(plan, history)):
        raise ValueError("\n".join(problems))
    stages = list(plan.stages)
    for number, saved in enumerate(history.stages):
        stages[number] = replace(stages[number], planned=tuple(saved["planned"]))
    return replace(plan, stages=tuple(stages))


def _changes(plan: StagePlan, history: History) -> Iterator[str]:
    file, consumed = "--data-stages", history.consumed_samples
    remedy = f"give the stages that have begun as they were; new ones may begin from sample {consumed} on"
    if len(plan.stages) < len(history.stages):
        missing = ", ".join(str(saved["name"]) or "0" for saved in history.stages[len(plan.stages) :])
        yield f"{file}: the checkpoint's run has begun stage {missing}, which is missing; {remedy}"
    for saved, stage in zip(history.stages, plan.stages, strict=False):
        where = stage.entry.where if stage.entry is not None else "the run"
        if saved["first_sample"] != stage.first_sample:
            rule = f"began at sample {saved['first_sample']} in the checkpoint, and begins at {stage.first_sample} now"
            yield f"{file}: {where} {rule}; {remedy}"
        if stage.entry is None:
            continue  # what the flags change is judged by the fingerprint of the data and the model's flags
        now = values_of(stage)
        for field, before in (saved["values"] or {}).items():
            if before != now.get(field):
                name = field_table()[field].name if field in field_table() else "--starts-anew"
                rule = f"has begun with {name[2:]} {_shown(before)}, and has {_shown(now.get(field))} now"
                yield f"{file}: {where} {rule}; {remedy}"
        for field in now.keys() - (saved["values"] or now).keys():
            yield f"{file}: {where} has begun without {field.replace('_', '-')}, and has it now; {remedy}"
    for stage in plan.stages[len(history.stages) :]:
        if stage.entry is not None and stage.first_sample < consumed:
            rule = f"begins at sample {stage.first_sample}, and the run is at sample {consumed}"
            yield f"{file}: {stage.entry.where} {rule}; {remedy}"


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
