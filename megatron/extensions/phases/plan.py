"""The plan of a run: its stages, and where each begins in samples, tokens and iterations.

All that a stage decides follows from the number of samples consumed before a step, so a run resumes anywhere and at any
layout. A stage begins with the first step at or behind the number that its file gives: no step is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.config.data import is_number
from megatron.core.config.optimizer import OptimizerConfig
from megatron.extensions.phases.stage_file import (
    DATA,
    LR_LENGTHS,
    LR_SHAPE,
    POSITIONS,
    SIZES,
    StageEntry,
    read_stages,
)
from megatron.training.config.batch_size import BatchSizes, samples_of_run
from megatron.training.config.flags import field_table
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig

COMPARED = (*DATA, *POSITIONS, "global_batch_size")
"""Fields in which a stage that has begun must stay what it was."""

NO_LENGTHS: Mapping[str, Any] = dict.fromkeys(LR_LENGTHS) | {
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_warmup_fraction": None,
}


@dataclass(frozen=True)
class Stage:
    """A part of the run with one blend, one sequence length, one batch size and one shape of the learning rate."""

    entry: StageEntry | None
    """What the file says; None for a run without stages."""

    config: RunConfig
    """The run's configuration in this stage."""

    first_sample: int
    first_iteration: int
    """Iterations before it."""

    first_token: int
    end: int | None
    """Samples of the run when it ends; None for a run of one epoch, whose length the data knows."""

    optimizer: OptimizerConfig | None = None
    """A learning-rate schedule of its own, in samples from its beginning on; None to go on with the run's."""

    planned: tuple[int, ...] = ()
    """Lengths in samples that it was planned with, in turn, before the present plan."""

    @property
    def name(self) -> str:
        return self.entry.name if self.entry is not None else ""

    @property
    def samples(self) -> int:
        assert self.end is not None
        return self.end - self.first_sample

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths that it was and is planned with; one that is no longer than those before changes no order."""
        longer = self.end is not None and self.samples > max(self.planned, default=0)
        return (*self.planned, self.samples) if longer else self.planned

    @property
    def tokens(self) -> int:
        return self.samples * self.config.model.seq_length

    def starts_anew(self, prefix: str) -> bool:
        """Whether a source that earlier stages took from begins again."""
        anew = self.entry.anew if self.entry is not None else False
        return anew if isinstance(anew, bool) else prefix in anew


@dataclass(frozen=True)
class StagePlan:
    """The stages of a run, one where the flags name none."""

    base: RunConfig
    """The configuration that the flags say."""

    stages: tuple[Stage, ...]
    sizes: BatchSizes
    """Global batch sizes over the whole run."""

    @property
    def samples(self) -> int:
        """Samples of the whole run."""
        end = self.stages[-1].end
        assert end is not None
        return end

    @property
    def iterations(self) -> int:
        """Steps of the whole run."""
        given = self.base.training.train_iters
        return given if given is not None else self.sizes.iterations(self.samples)

    @property
    def numbered_by_run(self) -> bool:
        """Whether a data set has every sample of the run under its number, whatever its stage."""
        return self.base.data.dataset != "gpt"

    def number_at(self, consumed_samples: int) -> int:
        """Number of the stage of the step that starts after so many samples; the last one from the run's end on."""
        return sum(consumed_samples >= stage.first_sample for stage in self.stages[1:])

    def at(self, consumed_samples: int) -> Stage:
        """The stage of the step that starts after so many samples."""
        return self.stages[self.number_at(consumed_samples)]

    def trained(self, consumed_samples: int) -> Stage:
        """The stage of the last step before."""
        return self.at(max(0, consumed_samples - 1))

    def tokens(self, consumed_samples: int) -> int:
        """Tokens of the first so many samples of the run."""
        stage = self.trained(consumed_samples)
        return stage.first_token + (consumed_samples - stage.first_sample) * stage.config.model.seq_length

    @property
    def longest(self) -> Stage:
        """The stage with the most tokens in a micro-batch, whose activations take the most memory."""
        return max(
            self.stages, key=lambda s: (s.config.training.micro_batch_size * s.config.model.seq_length, s.first_sample)
        )

    def record(self, consumed_samples: int) -> list[dict[str, Any]]:
        """What a checkpoint keeps of the stages that have begun, as JSON."""
        begun = [stage for stage in self.stages if stage.first_sample < max(1, consumed_samples)]
        return [
            {
                "name": stage.name,
                "first_sample": stage.first_sample,
                "planned": list(stage.lengths),
                "values": values_of(stage),
            }
            for stage in begun
        ]


def values_of(stage: Stage) -> dict[str, Any]:
    """What must not change in a stage that has begun. Data sets may move to another folder."""
    table, config = field_table(), stage.config
    found = {field: getattr(getattr(config, table[field].section), field) for field in COMPARED}
    words = found["data_path"] or ()
    found["data_path"] = [Path(word.rstrip("/")).name for word in words]
    shape = stage.entry.values if stage.entry is not None else ()
    found |= {field: value for field, value in shape if field in (*LR_SHAPE, *LR_LENGTHS)}
    anew = stage.entry.anew if stage.entry is not None else False
    return found | {"starts_anew": anew if isinstance(anew, bool) else list(anew)}


def stage_plan(config: RunConfig) -> StagePlan:
    """The plan of a resolved and validated configuration."""
    plan, problems = plan_stages(config)
    assert plan is not None and not problems, problems
    return plan


def plan_stages(config: RunConfig) -> tuple[StagePlan | None, list[Problem]]:
    """The plan, or None, and what is wrong with the order and beginnings of its stages."""
    path = config.data.data_stages
    if path is None:
        sizes = BatchSizes.from_config(config)
        return StagePlan(config, (Stage(None, config, 0, 0, 0, _samples(config, sizes)),), sizes), []
    entries, wrong = read_stages(path)
    problems = list(wrong)
    if not entries or not config.training.global_batch_size or config.model.seq_length < 1:
        return None, problems  # other rules report what is missing
    if any(not _positive(entry) for entry in entries):
        return None, problems
    stages, sizes, found = _walk(config, entries)
    problems += found
    end = _end(config, stages, sizes)
    if end is None:
        remedy = "add --train-iters, --train-samples or --train-tokens"
        problems.append(Problem("--data-stages", path, "the run needs a length", remedy))
        return None, problems
    for stage in stages[1:]:
        if stage.entry is not None and stage.first_sample >= end:
            rule = f"begins at sample {stage.first_sample:,}, and the run ends at sample {end:,}"
            remedy = "begin it earlier, remove it, or train for longer"
            problems.append(Problem(f"{stage.entry.where}: from-{stage.entry.unit}", stage.entry.start, rule, remedy))
    ends = [*(stage.first_sample for stage in stages[1:]), max(end, stages[-1].first_sample + 1)]
    stages = [_with_schedule(replace(stage, end=stop), config) for stage, stop in zip(stages, ends, strict=True)]
    return (None if found else StagePlan(config, tuple(stages), sizes)), problems


def _positive(entry: StageEntry) -> bool:
    numbers = [entry.value(field) for field in ("seq_length", *SIZES)]
    return all(number is None or number > 0 for number in numbers)


def _samples(config: RunConfig, sizes: BatchSizes) -> int | None:
    iterations = config.training.train_iters
    return samples_of_run(config) if iterations is None else sizes.samples(iterations)


def _walk(config: RunConfig, entries: Sequence[StageEntry]) -> tuple[list[Stage], BatchSizes, list[Problem]]:
    """The stages without ends and schedules, and the batch sizes of the run."""
    stages: list[Stage] = []
    problems: list[Problem] = []
    own_sizes = any(entry.value("global_batch_size") for entry in entries)
    sizes = BatchSizes.from_config(config)
    for entry in entries:
        of_stage = _config_of(config, entry)
        if not stages:
            first = Stage(entry, of_stage, 0, 0, 0, None)
        else:
            first = replace(_beginning(stages[-1], entry, sizes), config=of_stage)
            if first.first_sample <= stages[-1].first_sample:
                rule = f"must be behind the beginning of stage {stages[-1].name}, sample {stages[-1].first_sample:,}"
                problems.append(Problem(f"{entry.where}: from-{entry.unit}", entry.start, rule, "put it further on"))
        if own_sizes:
            size = of_stage.training.global_batch_size
            assert size is not None
            ended = ((first.first_sample, sizes.final),) if stages else ()
            sizes = BatchSizes(size, (*(sizes.earlier if stages else ()), *ended))
        stages.append(first)
    return stages, sizes, problems


def _beginning(before: Stage, entry: StageEntry, sizes: BatchSizes) -> Stage:
    """The stage of `entry` behind the stage `before`: at the first step at or behind what it says."""
    length = before.config.model.seq_length
    if entry.unit == "iterations":
        iterations = max(entry.start, 0)
    else:
        target = entry.start
        if entry.unit == "tokens":
            target = before.first_sample + -(-(entry.start - before.first_token) // length)
        iterations = sizes.iterations(max(target, 0))
        iterations += sizes.samples(iterations) < target
    sample = sizes.samples(iterations)
    token = before.first_token + (sample - before.first_sample) * length
    return Stage(entry, before.config, sample, iterations, token, None)


def _config_of(config: RunConfig, entry: StageEntry) -> RunConfig:
    """The run's configuration with what a stage changes, but for its learning rate."""
    sections: dict[str, dict[str, Any]] = {"model": {}, "training": {}, "data": {"data_stages": None}}
    for field, value in entry.values:
        if field in (*DATA, *SIZES, *POSITIONS):
            sections[field_table()[field].section][field] = value
    if "data_path" in sections["data"]:
        sections["data"] |= dict.fromkeys(field for field in config.data.listed)
    length, limit = sections["model"].get("seq_length", 0), config.model.max_position_embeddings
    if limit is not None and length > limit and config.model.position_embedding_type != "learned_absolute":
        sections["model"]["max_position_embeddings"] = length
    training = config.training
    micro = sections["training"].get("micro_batch_size", training.micro_batch_size)
    size = sections["training"].get("global_batch_size", training.global_batch_size)
    step = micro * (config.parallel.data_parallel_size or 1)
    if (micro, size) != (training.micro_batch_size, training.global_batch_size):
        sections["training"]["num_microbatches"] = size // step if size % step == 0 else None
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in sections.items() if new})


def _with_schedule(stage: Stage, config: RunConfig) -> Stage:
    """With the learning rate of its own, lengths in samples, if it has one."""
    if stage.entry is None or not stage.entry.own_lr:
        return stage
    given = {field: value for field, value in stage.entry.values if field in (*LR_SHAPE, *LR_LENGTHS)}
    fields: dict[str, Any] = {**NO_LENGTHS, **{field: given[field] for field in LR_SHAPE if field in given}}
    size = stage.config.training.global_batch_size
    assert size is not None
    for part in ("warmup", "decay", "wsd_decay"):
        for unit in ("iters", "samples", "tokens"):
            value = given.get(f"lr_{part}_{unit}")
            if value is not None:
                samples = {"iters": value * size, "samples": value}.get(unit, value // stage.config.model.seq_length)
                fields[f"lr_{part}_samples"] = samples
    fields.setdefault("lr_warmup_init", 0.0)
    return replace(stage, optimizer=replace(config.optimizer, **fields))


def _end(config: RunConfig, stages: Sequence[Stage], sizes: BatchSizes) -> int | None:
    """Samples of the whole run; the shorter of several lengths."""
    training, last = config.training, stages[-1]
    ends = []
    if training.train_tokens is not None:
        behind = training.train_tokens - last.first_token
        ends.append(last.first_sample + behind // last.config.model.seq_length)
    if training.train_samples is not None:
        ends.append(training.train_samples)
    if training.train_iters is not None:
        ends.append(sizes.samples(training.train_iters))
    return min(ends, default=None)


def stage_rules(config: RunConfig, plan: StagePlan | None) -> Iterator[Problem]:
    """Rules of flags beside --data-stages, on a resolved configuration."""
    path, training = config.data.data_stages, config.training
    if path is None:
        return
    entries, _ = read_stages(path)

    def those_with(*fields: str) -> str:
        return ", ".join(entry.where for entry in entries if any(entry.value(field) is not None for field in fields))

    if config.data.dataset not in ("gpt", "mock"):
        yield Problem.exclusive("--data-stages", path, f"--dataset-type {config.data.dataset}")
    if config.data.per_split and any(entry.value("data_path") for entry in entries):
        rule = "stages have data paths of their own, and cannot be combined with --train-data-path and its kin"
        yield Problem("--data-stages", path, rule, "give --valid NAME=PREFIX, or no data paths in the stages")
    if config.data.dataset == "mock" and (where := those_with("data_path")):
        yield Problem(
            "--data-stages", path, f"{where}: synthetic data has no files", "remove data-path, or --mock-data"
        )
    ramp = "--rampup-batch-size" if training.rampup_batch_size else "--step-batch-size-schedule"
    if training.batch_size_varies:
        if training.train_iters is not None:
            rule = "cannot be combined with --train-iters in a run of stages: iterations differ in samples"
            yield Problem(ramp, None, rule, "use --train-samples or --train-tokens instead")
        if where := those_with("global_batch_size"):
            yield Problem(ramp, None, f"{where} set global-batch-size too", "keep one of them")
        if training.step_batch_size_schedule and (where := those_with("seq_length")):
            rule = f"counts tokens of --seq-length {config.model.seq_length}, and {where} has another length"
            yield Problem(ramp, None, rule, "set global-batch-size in the stages instead")
    for field in ("lr_warmup_tokens", "lr_decay_tokens"):
        if getattr(config.optimizer, field) is not None and (where := those_with("seq_length")):
            rule = f"counts tokens of --seq-length {config.model.seq_length}, and {where} has another length"
            yield Problem(field_table()[field].name, None, rule, "give samples, or the schedule in the stages")
    if not config.checkpoint.load_lr_state:
        rule = "cannot be combined with --data-stages, whose schedules follow the samples of the run"
        yield Problem("--no-load-lr-state", None, rule, "remove it")
    shapes = {(s.config.model.seq_length, s.config.training.micro_batch_size) for s in plan.stages} if plan else set()
    if config.parallel.cuda_graph_impl == "local" and len(shapes) > 1:
        rule = "its graphs have one shape, and stages differ in seq-length or micro-batch-size"
        yield Problem("--cuda-graph-impl", "local", rule, "use --cuda-graph-impl none")
    where = those_with("rotary_scaling_factor", "rope_type", "mscale")
    if config.model.attention_facts.scales_scores and config.model.mscale_all_dim and where:
        rule = f"scales the softmax, which is set when the model is built, and {where} changes YaRN's scaling"
        yield Problem("--mscale-all-dim", config.model.mscale_all_dim, rule, "give YaRN's flags for the whole run")
    if config.optimizer.decoupled_lr is not None and (where := those_with("lr")):
        rule = f"has one peak for the whole run, and {where} changes lr"
        yield Problem("--decoupled-lr", config.optimizer.decoupled_lr, rule, "use --param-group 'REGEX lr_mult=...'")
    for entry in entries:
        words = entry.value("data_path") or ()
        if len(words) > 1 and not any(is_number(word) for word in words):
            rule = "names several data sets without weights, which would be read once"
            yield Problem(f"{entry.where}: data-path", words, rule, "put a weight before each")


def checked_configs(plan: StagePlan) -> Iterator[tuple[Stage, RunConfig]]:
    """(stage, a configuration that the rules of a run can judge) of each stage of a file."""
    for stage in plan.stages:
        if stage.entry is None:
            continue
        plain = replace(stage.config.optimizer, **NO_LENGTHS, lr_decay_style="constant")
        training = replace(
            stage.config.training,
            train_samples=stage.samples,
            train_iters=None,
            train_tokens=None,
        )
        yield stage, replace(stage.config, optimizer=stage.optimizer or plain, training=training)
