"""Rules about the phases of a file: each phase must be a valid configuration, and a resumed run must not change phases
that have begun.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron.core.config.data import weight_of
from megatron.extensions.data.phases.file_phase import NO_LENGTHS, FilePhase, values_of
from megatron.extensions.data.phases.flags import BatchScheduleFlags, PhasesConfig
from megatron.extensions.data.phases.phase_file import read_phases
from megatron.training.config.flags import field_table, named_value, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.rules.data import listed
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import History


def findings(
    config: RunConfig,
    resolved: RunConfig,
    judge: Callable[[RunConfig], list[Problem]],
    phases: Sequence[FilePhase] | None,
    problems: Sequence[Problem],
) -> list[Problem]:
    """Return the problems with the flags, with each phase, and with the file.

    Args:
        config: Configuration that the flags specify.
        resolved: Resolved configuration.
        judge: Function that checks a configuration and returns the problems with it.
        phases: Phases that the file defines, or None if the file is invalid.
        problems: Problems that were found before this function is called.
    """
    problems = [*problems, *phase_rules(resolved, phases or ())]
    if phases is None:
        return problems + [p for p in judge(config) if (p.flag, p.value) != ("--data-path", None)]
    own = judge(_without_phases(config, phases[0]))
    told = {str(problem) for problem in own}
    for phase in phases:
        for problem in judge(_judged(phase)):
            if str(problem) not in told and not problem.harmless:
                problems.append(replace(problem, flag=f"{phase.entry.where}: {problem.flag}"))
    return own + list(dict.fromkeys(problems))


def _without_phases(config: RunConfig, first: FilePhase) -> RunConfig:
    """Return the configuration of the run without its phases, so that the rules for flags can check it. If no flag
    specifies data, the data of the first phase is used."""
    data = config.data
    if data.dataset == "gpt" and not (data.data_path or data.per_split or listed(config)):
        data = replace(data, data_path=first.config.data.data_path)
    return replace(config, data=data).with_options(replace(config.options(PhasesConfig), data_phases=None))


def _judged(phase: FilePhase) -> RunConfig:
    """Return a configuration that describes the phase as a separate run, so that the rules for flags can check it."""
    plain = with_named(phase.config, {**NO_LENGTHS, "lr_decay_style": "constant"}).optimizer
    training = replace(phase.config.training, train_samples=phase.samples, train_iters=None, train_tokens=None)
    return replace(phase.config, optimizer=phase.optimizer or plain, training=training)


def phase_rules(config: RunConfig, phases: Sequence[FilePhase]) -> Iterator[Problem]:
    """Check that the other flags of a resolved configuration can be combined with --data-phases."""
    path, training = config.options(PhasesConfig).data_phases, config.training
    assert path is not None
    entries, _ = read_phases(path)

    def those_with(*fields: str) -> str:
        return ", ".join(entry.where for entry in entries if any(entry.value(field) is not None for field in fields))

    if config.data.dataset not in ("gpt", "mock"):
        yield Problem.exclusive("--data-phases", path, f"--dataset-type {config.data.dataset}")
    if config.data.per_split and any(entry.value("data_path") for entry in entries):
        rule = "phases with data paths cannot be combined with --train-, --valid- or --test-data-path"
        yield Problem("--data-phases", path, rule, "set --valid NAME=PREFIX, or no data paths in the phases")
    if config.data.dataset == "mock" and (where := those_with("data_path")):
        yield Problem(
            "--data-phases", path, f"{where}: synthetic data has no files", "remove data-path, or --mock-data"
        )
    changes = config.options(BatchScheduleFlags)
    ramp = "--rampup-batch-size" if changes.rampup_batch_size else "--step-batch-size-schedule"
    if changes != BatchScheduleFlags():
        if training.train_iters is not None:
            rule = "cannot be combined with --train-iters if phases change the samples per iteration"
            yield Problem(ramp, None, rule, "use --train-samples or --train-tokens instead")
        if where := those_with("global_batch_size"):
            yield Problem(ramp, None, f"cannot be combined with global-batch-size in {where}", "keep one of them")
        if changes.step_batch_size_schedule and (where := those_with("seq_length")):
            rule = f"counts tokens of --seq-length {config.model.seq_length}, but {where} has a different length"
            yield Problem(ramp, None, rule, "set global-batch-size in the phases instead")
    for field in ("lr_warmup_tokens", "lr_decay_tokens"):
        if getattr(config.optimizer, field) is not None and (where := those_with("seq_length")):
            rule = f"counts tokens of --seq-length {config.model.seq_length}, but {where} has a different length"
            yield Problem(field_table()[field].name, None, rule, "set the schedule in samples, or in each phase")
    if not config.checkpoint.load_lr_state:
        rule = "cannot be combined with --data-phases, whose schedules follow the samples of the run"
        yield Problem("--no-load-lr-state", None, rule, "remove it")
    shapes = {(s.config.model.seq_length, s.config.training.micro_batch_size) for s in phases}
    if named_value(config, "cuda_graph_impl") == "local" and len(shapes) > 1:
        rule = "needs one shape, but phases differ in seq-length or micro-batch-size"
        yield Problem("--cuda-graph-impl", "local", rule, "use --cuda-graph-impl none")
    where = those_with("rotary_scaling_factor", "rope_type", "mscale")
    if config.model.attention_facts.scales_scores and config.model.mscale_all_dim and where:
        rule = f"scales the softmax, which is set when the model is built, but {where} changes YaRN's scaling"
        yield Problem("--mscale-all-dim", config.model.mscale_all_dim, rule, "set YaRN's flags for the whole run")
    if config.optimizer.decoupled_lr is not None and (where := those_with("lr")):
        rule = f"has one peak for the whole run, but {where} changes lr"
        yield Problem("--decoupled-lr", config.optimizer.decoupled_lr, rule, "use --param-group 'REGEX lr_mult=...'")
    for entry in entries:
        words = entry.value("data_path")
        if isinstance(words, list | tuple) and len(words) > 1 and all(weight_of(word) is None for word in words):
            rule = "names several data sets without weights, which cannot be repeated"
            yield Problem(f"{entry.where}: data-path", words, rule, "put a weight before each data set")


def changes(phases: Sequence[FilePhase], history: History) -> Iterator[str]:
    """Check the phases of a resumed run. The function yields a message for each changed phase that had already begun
    when the checkpoint was saved, and for each new phase that would begin before the run's current sample."""
    for saved, phase in zip(history.phases, phases, strict=False):
        where = phase.entry.where
        if saved["first_sample"] != phase.first_sample:
            rule = f"began at sample {saved['first_sample']} in the checkpoint, but now begins at {phase.first_sample}"
            yield f"{where} {rule}"
        now, before = phase.values, saved["values"]
        if before is None:
            # The checkpoint is from a run without phases, so the configuration of that run is compared.
            before = values_of(history.config) if history.config is not None else {}
        for field, value in before.items():
            if value != now.get(field):
                name = field_table()[field].name if field in field_table() else "--starts-anew"
                rule = f"has begun with {name[2:]} {_shown(value)}, but now has {_shown(now.get(field))}"
                yield f"{where} {rule}"
        for field in now.keys() - (before or now).keys():
            yield f"{where} has begun without {field.replace('_', '-')}, but now has it"
    for phase in phases[len(history.phases) :]:
        if phase.first_sample < history.consumed_samples:
            rule = f"begins at sample {phase.first_sample}, but the run is at sample {history.consumed_samples}"
            yield f"{phase.entry.where} {rule}"


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
