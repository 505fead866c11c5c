"""Flags whose values a run takes from the checkpoint that it loads (--use-checkpoint-args and related flags).

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from megatron.core.config.data import TOKENIZERS
from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.core.dist_checkpointing.path_kind import METADATA, TOKENIZER_FOLDER, candidates, is_foreign_model
from megatron.training.config.batch_size import BatchSizes, samples_of_run
from megatron.training.config.flags import (
    EXTENSION_SECTIONS,
    all_flags,
    config_of_sections,
    dashed,
    field_table,
    flags_of,
    holds,
    named_value,
    spelling_table,
    value_of,
    with_named,
)
from megatron.training.config.rules.saved_types import metadata_problem
from megatron.training.config.run_config import CheckpointConfig, Point, RunConfig
from megatron.training.plan import PLANS, History

SCHEDULE = ("lr", "min_lr", "start_weight_decay", "end_weight_decay", "weight_decay", "weight_decay_incr_style")
"""Fields of `OptimizerConfig` that belong to the learning-rate and weight-decay schedule, but whose names do not start
with lr_."""


def training_only() -> frozenset[str]:
    """Return the names of the model fields that affect how a model is trained or stored, but not its outputs.
    `extension_options` is also returned, because its values belong to components that other fields select.
    """
    return frozenset(flag.field for flag in all_flags() if flag.spec.training_only) | {"extension_options"}


def with_saved_flags(config: RunConfig, given: Collection[str] = ()) -> tuple[RunConfig, list[str]]:
    """Return the configuration with the flags that the run takes from its checkpoint, and a line for each changed flag.

    Args:
        given: Spellings of the flags that the user set.

    Raises:
        ValueError: If the checkpoint cannot be read.
    """
    config, notes = _with_saved_modules(config)
    config, of_defaults = _with_former_defaults(config, given)
    notes += of_defaults
    options = config.checkpoint
    wanted = options.use_checkpoint_args, options.use_checkpoint_opt_param_scheduler
    if not any(wanted):
        return config, notes
    flag = "--use-checkpoint-args" if wanted[0] else "--use-checkpoint-opt_param-scheduler"
    if options.load is None:
        return config, [*notes, f"{flag}: has no effect without --load"]
    saved = saved_sections(located(options.load))
    if saved is None and is_foreign_model(options.load) and flag == "--use-checkpoint-args":
        return config, notes  # a model of another program always determines the model flags
    if saved is None:
        return config, [*notes, f"{flag}: there is no checkpoint in --load {options.load}, so the flags apply"]
    before = config_of_sections(saved)
    for values in (
        dict(_model_fields(before)) if wanted[0] else {},
        dict(_schedule_fields(before)) if wanted[1] else {},
    ):
        changed = {field: value for field, value in values.items() if named_value(config, field) != value}
        notes += [
            f"{field_table()[field].name} is {value}, as in the checkpoint, not {named_value(config, field)}"
            for field, value in changed.items()
            # A default value gets no note, because the user probably did not set it.
            if named_value(config, field) != field_table()[field].default
        ]
        config = with_named(config, changed)
    if wanted[0]:
        of_run, lines = _saved_tokenizer(config, before, located(options.load))
        config, notes = with_named(config, of_run), notes + lines
    return config, notes


TOKENIZER_FIELDS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
"""Fields that select a run's tokenizer; all but the first are paths."""


def _saved_tokenizer(config: RunConfig, saved: RunConfig, load: PurePath) -> tuple[dict[str, str | None], list[str]]:
    """Return the values of the tokenizer fields in the saved run, and a note for each tokenizer file that is read from
    the copy in the checkpoint's folder.

    If the configuration sets a tokenizer flag, the saved run's tokenizer is not used, and both results are empty.
    """
    if any(getattr(config.tokenizer, field) is not None for field in TOKENIZER_FIELDS):
        return {}, []
    values: dict[str, str | None] = {field: getattr(saved.tokenizer, field) for field in TOKENIZER_FIELDS}
    notes = []
    for field, path, kept in _moved(values, load):
        values[field] = kept
        why = f"the path in the checkpoint does not exist: {path}"
        notes.append(f"{dashed(field)} is {kept}, the copy that the run saved, because {why}")
    return values, notes


def _moved(values: dict[str, str | None], load: PurePath) -> Iterator[tuple[str, str, str]]:
    """Yield (field, path, path of the copy in the checkpoint) for each tokenizer file that no longer exists at the path
    that the saved run used."""
    name = values["tokenizer_type"]
    in_folder = name is not None and name in TOKENIZERS and TOKENIZERS.facts(name).finds_files
    for field in TOKENIZER_FIELDS[1:]:
        path = values[field]
        if path is None or storage_of(located(path)).exists(located(path)):
            continue
        for folder in (load / TOKENIZER_FOLDER, load.parent / TOKENIZER_FOLDER):
            kept = folder if in_folder else folder / Path(path).name
            if storage_of(kept).exists(kept):
                yield field, path, str(kept)
                break


def _with_saved_modules(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Return a configuration in which the multi-token prediction modules have the same layer kind as in the checkpoint,
    and notes about the changes. The configuration changes only if the model has layers of different kinds, and the
    multi-token prediction modules in the checkpoint have the kind of the last layer."""
    model, load = config.model, config.checkpoint.load
    differ = model.window_attn_skip_freq is not None or model.no_rope_freq is not None
    if not (model.mtp_depths and differ) or load is None or config.checkpoint.finetune:
        return config, []
    before = (saved_sections(located(load)) or {}).get("model", {}).get("mtp_layer_kind")
    if before != "last_layer" or model.mtp_layer_kind == before:
        return config, []
    return replace(config, model=replace(model, mtp_layer_kind="last_layer")), [
        f"--mtp-layer-kind is {before}, as in the checkpoint, not {model.mtp_layer_kind}"
    ]


def _with_former_defaults(config: RunConfig, given: Collection[str]) -> tuple[RunConfig, list[str]]:
    """For fields whose default has changed, use the value in the checkpoint, unless `given` contains the field's flag.
    Return the resulting configuration and notes about changed fields. Errors in the checkpoint are not reported here,
    but when the checkpoint is loaded."""
    load, table = config.checkpoint.load, spelling_table()
    spelled = {table[name][0].field for name in given if name in table}
    wanted = [flag for flag in all_flags() if flag.spec.keeps_saved and flag.field not in spelled]
    if load is None or config.checkpoint.finetune or not wanted:
        return config, []
    try:
        sections = saved_sections(located(load))
        if sections is None:
            return config, []
        saved = config_of_sections(sections)
    except (ValueError, TypeError, LookupError, AttributeError):
        return config, []
    changed, notes = dict[str, object](), list[str]()
    for flag in wanted:
        before, now = value_of(saved, flag), value_of(config, flag)
        if before != now and all(holds(saved, condition) for condition in flag.section_needs):
            changed[flag.field] = before
            notes.append(f"{flag.name} is {before}, as in the checkpoint, not {now}: the default has changed")
    return with_named(config, changed), notes


def resumed_metadata(options: CheckpointConfig) -> dict[str, Any] | None:
    """Return the metadata (everything except tensors) of the checkpoint from which a run continues, or None if the run
    starts at iteration 0.

    Raises ValueError if no checkpoint is readable, or if another program wrote the checkpoints.
    """
    if options.load is None or options.anew:
        return None
    load = located(options.load)
    return saved_metadata(located(options.save or load) if is_foreign_model(load) else load)


def read_history(options: CheckpointConfig) -> History | None:
    """Return the history of training phases that is stored in the checkpoint from which a run resumes. Return None if
    the run starts at sample 0, or if its data may differ from the checkpoint's data (--override-data-fingerprint).

    Raises ValueError if no checkpoint can be read.
    """
    if options.override_data_fingerprint:
        return None
    metadata = resumed_metadata(options)
    if metadata is None or not metadata.get("consumed_samples"):
        return None
    config = config_of_sections(metadata["config"])
    phases = metadata.get("stages")
    if phases is None:  # a checkpoint converted from another program has no phases
        samples = samples_of_run(config)
        if config.training.train_iters is not None and config.training.global_batch_size:
            samples = BatchSizes.from_config(config).samples(config.training.train_iters)
        phases = [{"name": "", "first_sample": 0, "planned": [samples] if samples else [], "values": {}}]
    return History(int(metadata["consumed_samples"]), phases, config)


def with_past_batches(config: RunConfig) -> RunConfig:
    """Return the configuration with the batch sizes that the run used before it saved the checkpoint from which it
    resumes."""
    try:
        metadata = resumed_metadata(config.checkpoint)
    except ValueError:
        return config  # the error is reported when the checkpoint is loaded
    return config if metadata is None else replace(config, past_batches=past_batches(metadata))


def past_batches(metadata: dict[str, Any]) -> tuple[Point, ...]:
    """Return the positions at which the saved run changed its batch size, followed by the position of the checkpoint.

    If the metadata contain no batch-size changes, the batch size of the saved run was constant.
    """
    here = metadata.get("iteration"), metadata.get("consumed_samples")
    if not all(isinstance(value, int) for value in here):
        return ()
    found = metadata.get("past_batches") or [[0, 0], here]
    return tuple(dict.fromkeys((int(iterations), int(samples)) for iterations, samples in found))


def saved_sections(load: PurePath) -> dict[str, dict[str, object]] | None:
    """Return the configuration sections of the latest checkpoint in a folder, or None if there is no checkpoint.

    If a training phase has changed a flag, the sections contain the flag's value for the whole run, not for this phase.
    Raises ValueError if no checkpoint is readable, or if another program wrote the checkpoints.
    """
    metadata = saved_metadata(load)
    if metadata is None:
        return None
    sections: dict[str, dict[str, object]] = metadata["config"]
    return sections | {"model": sections["model"] | metadata.get("model_of_run", {})}


def saved_metadata(load: PurePath) -> dict[str, Any] | None:
    """Return the metadata (everything except tensors) of the latest checkpoint in a folder, or None if there is no
    checkpoint.

    If the latest checkpoint cannot be read, the previous one is used, as when a run loads a checkpoint. Raises
    ValueError if no checkpoint is readable, or if another program wrote the checkpoints.
    """
    damaged = []
    try:
        folders = candidates(load).folders
    except ValueError as error:
        raise ValueError(f"--load {error}") from None
    for folder in folders:
        if storage_of(folder).exists(folder / METADATA):
            try:
                return _read(folder / METADATA)
            except ValueError as error:
                damaged.append(str(error))
    if damaged:
        raise ValueError("\n".join(damaged))
    return None


def _read(metadata: PurePath) -> dict[str, Any]:
    try:
        values: dict[str, Any] = parse_json(storage_of(metadata).read(metadata).decode())
        if not all(isinstance(values["config"][name], dict) for name in ("model", "optimizer", "training")):
            raise TypeError
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{metadata} is damaged: it contains no configuration") from None
    check_types(values, metadata)
    return values


def check_types(values: dict[str, object], metadata: PurePath) -> None:
    """Raise ValueError if any value in the metadata of a checkpoint has the wrong type. The error message names the
    file and the wrong entry."""
    if broken := metadata_problem(values):
        raise ValueError(f"{metadata} is damaged: {broken}")


LENGTH = ("train_iters", "train_samples", "train_tokens", "global_batch_size")
"""Fields that determine the length of a run and of its steps."""


def changed_lengths(saved: RunConfig, run: RunConfig) -> str | None:
    """Return a line that describes which flags of the run's length and learning-rate schedule have changed since the
    saved run, or None if no flag has changed."""
    changed, wanted = [], {*LENGTH, *SCHEDULE, *(PLANS.facts(name).field for name in PLANS)}
    by_tokens = saved.training.train_tokens is not None and run.training.train_tokens is not None
    for flag in all_flags():
        scheduled = flag.section == "optimizer" and flag.field.startswith("lr_")
        if not (flag.field in wanted or scheduled) or (by_tokens and flag.field == "train_samples"):
            continue
        before, now = value_of(saved, flag), value_of(run, flag)
        if before != now:
            changed.append(
                f"{flag.name} {'not given' if before is None else before} -> {now if now is not None else 'not given'}"
            )
    if not changed:
        return None
    line = f"changed since the checkpoint: {', '.join(changed)}; samples continue in the original order"
    ends = [run.optimizer.lr_decay_iters, run.optimizer.lr_decay_samples, run.optimizer.lr_decay_tokens]
    lengthened = any(getattr(saved.training, f) != getattr(run.training, f) for f in LENGTH[:3])
    if lengthened and not any(ends) and run.optimizer.lr_decay_style != "constant":
        line += ", and the learning rate decays to the new end (--use-checkpoint-opt_param-scheduler keeps the old one)"
    return line


def free_choices(saved: RunConfig) -> frozenset[str]:
    """Return the names of the model fields that do not affect the model's outputs. A run that starts from converted
    weights may set these fields to other values than `saved`."""
    learned = saved.model.position_embedding_type == "learned_absolute"
    free = training_only() - WITH_PARAMETERS
    return free if learned else free | {"max_position_embeddings"}


WITH_PARAMETERS = {"make_vocab_size_divisible_by", "pad_vocab_size_to", "mtp_num_layers"}
"""Fields of flags with `FlagSpec.training_only` that nevertheless change the model's parameters."""


def changed_fields(
    saved: RunConfig,
    run: RunConfig,
    sections: Collection[str],
    ignored: Collection[str] = (),
    where: tuple[str, str] = ("in the checkpoint", "in the run"),
) -> list[str]:
    """Return each flag that affects results and has different values in two runs, together with both values.

    The function compares the flags of the model and of the extensions in the checkpoint's `sections`. A field is not
    reported if it is derived from another field and differs only because that other field differs.

    Args:
        saved: Configuration of the checkpoint.
        run: Configuration of the run.
        sections: Extension sections in the checkpoint.
        ignored: Names of fields that are left out of the comparison.
        where: Words that name the two runs in the result.
    """
    changed = []
    fixed = {title for title, section in EXTENSION_SECTIONS.items() if not section.may_change}
    compared = {flag.section for flag in flags_of("model")} | fixed.intersection(sections)
    for flag in all_flags():
        free = flag.spec.without_effect or flag.spec.may_change or flag.field in ignored
        if free or flag.section not in compared:
            continue
        given = [value_of(config, flag) for config in (saved, run)]
        if given[0] == given[1]:
            continue
        effective = flag.spec.effective
        values = [getattr(config.model, effective) for config in (saved, run)] if effective else given
        if values[0] != values[1]:
            before, now = (value if one is None else one for one, value in zip(given, values, strict=True))
            changed.append(f"{flag.name} {before} {where[0]}, {now} {where[1]}")
    return changed


def _model_fields(saved: RunConfig) -> Iterator[tuple[str, object]]:
    for flag in flags_of("model"):
        if not flag.spec.without_effect:
            yield flag.field, value_of(saved, flag)


def _schedule_fields(saved: RunConfig) -> Iterator[tuple[str, object]]:
    """Yield the fields of the learning-rate and weight-decay schedule, with their values. If the learning rate of the
    saved run decays over the whole run, the length of that run is kept as the length of the decay."""
    for flag in all_flags():
        if flag.section == "optimizer" and (flag.field.startswith("lr_") or flag.field in SCHEDULE):
            value = getattr(saved.optimizer, flag.field)
            if flag.field == "lr_decay_iters" and saved.optimizer.lr_decay_samples is None:
                value = value or (saved.training.train_iters if saved.training.train_samples is None else None)
            if flag.field == "lr_decay_samples" and saved.optimizer.lr_decay_iters is None:
                value = value or saved.training.train_samples
            yield flag.field, value
