"""Select the newest complete and undamaged checkpoint, check that it fits the run, and choose the tensors to load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import PurePath
from typing import Any

from megatron.core.collectives import gather_objects
from megatron.core.config.optimizers import OPTIMIZERS, STATE_STORES
from megatron.core.dist_checkpointing.dcp_index import INDEX
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import MANIFEST, damages, read_manifest
from megatron.core.dist_checkpointing.path_kind import LATEST, METADATA, Candidates, candidates, saved_folders
from megatron.core.dist_checkpointing.state_dict import (
    CALLBACKS,
    MAIN_PARAM,
    MODEL,
    OPTIMIZER,
    StateDict,
    optimizer_key,
)
from megatron.core.dist_checkpointing.storage import Checkpoint, on_first_rank, open_checkpoint, ranks_without
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import HISTORY
from megatron.core.pipeline_parallel.stage_parameters import stage_metas
from megatron.training.config.flags import all_flags, config_of_sections, field_table, flags_of, named_value, value_of
from megatron.training.config.rules.fields import single_values
from megatron.training.config.rules.saved_types import metadata_problem
from megatron.training.config.run_config import CheckpointConfig, RunConfig
from megatron.training.config.saved_flags import changed_fields, check_types, free_choices, past_batches
from megatron.training.plan import PLANS
from megatron.training.progress import Progress

REMEDY = "name a folder on a file system that all hosts share"


def choose_checkpoint(
    path: PurePath,
    world: Axis,
    say: Callable[[str], None] = lambda line: None,
    verified: bool = True,
) -> Checkpoint | None:
    """Open the newest complete and undamaged checkpoint. Return None if there is no checkpoint. Collective over
    `world`.

    If `verified` is True, the ranks read all files of a checkpoint and compare them with its manifest. A checkpoint
    also counts as damaged if its metadata contain a value of the wrong type. `say` receives one line for each skipped
    checkpoint, on every rank. Raises ValueError on every rank if there are checkpoints but none is readable.
    """
    found = on_first_rank(lambda: candidates(path), world)
    _check_seen(path, found, world)
    reasons = list(found.remarks)
    for remark in found.remarks:
        say(remark)
    for folder in found.folders:
        problems = verify(folder, world) if verified else []
        if not problems:
            try:
                checkpoint = open_checkpoint(folder, world)
                if (broken := metadata_problem(checkpoint.payload)) is None:
                    return checkpoint
                problems = [f"{METADATA} is damaged: {broken}"]
            except ValueError as error:
                problems = [str(error)]
        reasons.append(f"skipped checkpoint {folder}: {'; '.join(problems)}")
        say(reasons[-1])
    if reasons:
        raise ValueError(
            f"{path} holds no checkpoint that can be loaded: " + ". ".join(reasons) + ". Restore one from a copy, "
            "or name another folder"
        )
    return None


def _check_seen(path: PurePath, found: Candidates, world: Axis) -> None:
    """Raise ValueError on every rank if only some ranks see the checkpoints, as happens when hosts have separate disks.

    Instead of a shared folder, every host may have a complete copy of the checkpoints.
    """
    if found.folders:
        without = ranks_without(any(storage_of(folder).exists(folder) for folder in found.folders), world)
        if without:
            raise ValueError(
                f"the checkpoints that rank 0 sees in {path} are not there for {without}; {REMEDY}, or copy them whole "
                "to each host"
            )
    elif with_own := ranks_without(not saved_folders(path), world):
        raise ValueError(
            f"rank 0 sees no checkpoint in {path} and would start from scratch, but checkpoints exist there for "
            f"{with_own}; {REMEDY}"
        )


def verify(folder: PurePath, world: Axis) -> list[str]:
    """Compare a checkpoint's files with its manifest; each rank reads some of the files. Return the problems of all
    files, equal on all ranks."""

    def sums_or_reason() -> tuple[dict[str, dict[str, int]], str | None]:
        try:
            sums = read_manifest(folder)
            needed = {METADATA, INDEX, *(name for name in storage_of(folder).names(folder) if name.endswith(".distcp"))}
            unlisted = ", ".join(sorted(needed - sums.keys()))
            return sums, f"{MANIFEST} does not list {unlisted}" if unlisted else None
        except ValueError as error:
            return {}, str(error)

    sums, reason = on_first_rank(sums_or_reason, world)
    if reason is not None:
        return [reason]
    largest_first = sorted(sums, key=lambda name: -sums[name]["bytes"])
    mine = damages(folder, sums, largest_first[world.rank :: world.size])
    return [problem for problems in gather_objects(mine, world) for problem in problems]


FORMAT_VERSION = 1

PAYLOAD = {"iteration": int, "consumed_samples": int, "config": dict, "optimizer": dict, "rng": dict}
"""Required entries in the metadata of a checkpoint, with their types. Without these entries, a run cannot resume."""


def saved_config(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration of the run that saved a checkpoint. Raises ValueError if this version cannot read the
    checkpoint."""
    version = checkpoint.payload.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"checkpoint {checkpoint.folder} has format version {version}, but this program reads {FORMAT_VERSION}: "
            "load it with the version of the program that saved it"
        )
    for name, kind in PAYLOAD.items():
        value = checkpoint.payload.get(name)
        if not isinstance(value, kind) or (isinstance(value, int) and value < 0):
            raise ValueError(f"checkpoint {checkpoint.folder} cannot be read: its {name} is {f'{value!r}'[:40]}")
    check_types(checkpoint.payload, checkpoint.folder / METADATA)
    config = config_of_sections(checkpoint.payload["config"])
    names = {flag.name for flag in flags_of("model")}
    if broken := next((each for each in single_values(config) if each.flag in names), None):
        raise ValueError(f"{checkpoint.folder / METADATA} is damaged: its {broken}")
    count, layers = len(checkpoint.tensors), config.model.num_layers + (config.model.mtp_num_layers or 0)
    if layers > count:  # checked before code allocates a list with `layers` entries
        raise ValueError(f"{checkpoint.folder / METADATA} is damaged: {layers:,} layers cannot have {count} tensors")
    return config


def check_may_start(options: CheckpointConfig) -> None:
    """Raise ValueError unless the flags permit the run to start without a checkpoint. Call this function if the --load
    folder contains no checkpoint."""
    flag = "--finetune" if options.finetune else "--exit-on-missing-checkpoint"
    if options.finetune or options.exit_on_missing_checkpoint:
        raise ValueError(
            f"{flag} needs a checkpoint, and --load {options.load} holds no checkpoint (there is no {LATEST} in it): "
            f"correct the path, or drop {flag} to start from scratch"
        )
    load = options.load_root
    if load is not None and not options.may_be_missing and not storage_of(load).exists(load):
        raise ValueError(
            f"--load {options.load} does not exist and is not the --save folder; correct the path, or add "
            "--allow-missing-checkpoint to start from scratch"
        )


def check_fits(checkpoint: Checkpoint, config: RunConfig, load_optimizer: bool, data_fingerprint: str | None) -> None:
    """Raise a ValueError that lists all differences from the saved run that prevent this run from continuing it.

    The training data of the two runs are compared by fingerprint, if both fingerprints are known.
    """
    options = config.checkpoint
    saved = saved_config(checkpoint)
    problems = []
    before, now = (each.model.vocab_size or 0 for each in (saved, config))
    if now > before and not (options.finetune and _same_rows(saved, config)):
        problems.append(
            f"its vocabulary has {before} tokens, but the run's has {now} (--vocab-size, or the tokenizer's): to "
            "add tokens, convert it to a Hugging Face folder with tools/convert_checkpoint.py, and --load that folder"
        )
    if not options.finetune:
        ignored = free_choices(saved) if converted(checkpoint) else frozenset[str]()
        if changed := changed_fields(saved, config, checkpoint.payload["config"], ignored):
            problems.append(
                "the run's model differs: " + ", ".join(changed) + "; give the checkpoint's values, "
                "or --finetune to load weights of equal shapes only and start at iteration 0"
                + (_new_phase(config) if saved.model.seq_length != config.model.seq_length else "")
            )
        if options.load_rng and not converted(checkpoint) and saved.training.seed != config.training.seed:
            problems.append(
                f"--seed is {saved.training.seed} in the checkpoint but {config.training.seed} in the run, which "
                "changes dropout and data order: use that seed, or --no-load-rng to continue with the new seed"
            )
        # the data may differ if nothing is trained, or if training starts again at iteration 0
        other = options.override_data_fingerprint or options.reset_iteration or config.training.skip_train
        if problem := _other_data(checkpoint, other, data_fingerprint):
            problems.append(problem + _new_phase(config))
    if load_optimizer and not any(key.startswith(OPTIMIZER) for key in checkpoint.tensors):
        problems.append("it has no optimizer state: add --no-load-optim to continue with fresh moments, or --finetune")
    elif load_optimizer:
        fields = OPTIMIZERS.facts(config.optimizer.optimizer).fields
        problems += [
            f"--{field.replace('_', '-')} is {before} in the checkpoint but {now} in the run: use that value, "
            "or --no-load-optim to start with new optimizer states"
            for field in ("optimizer", *fields)
            for before, now in [(named_value(saved, field), named_value(config, field))]
            if before != now
        ]
    if problems:
        raise ValueError(f"checkpoint {checkpoint.folder} does not fit the run: " + "; ".join(problems))


def _new_phase(config: RunConfig) -> str:
    """Return advice for a user who has changed the data or the sequence length. The advice names flags that divide a
    run into phases. Return an empty string if the run already has phases."""
    flags = [field_table()[PLANS.facts(name).field] for name in PLANS]
    if not flags or any(value_of(config, flag) is not None for flag in flags):
        return ""
    named = " or ".join(flag.name for flag in flags)
    return f", or {named} to continue with other data or another sequence length in a new phase (docs/data.md)"


def _same_rows(saved: RunConfig, config: RunConfig) -> bool:
    return saved.model.vocab_size is not None and saved.model.padded_vocab_size == config.model.padded_vocab_size


def tell_of_new_tokens(saved: RunConfig, config: RunConfig, say: Callable[[str], None]) -> None:
    """With --finetune, report the new tokens whose embedding rows were only vocabulary padding in the checkpoint."""
    before, now = (each.model.vocab_size or 0 for each in (saved, config))
    if now > before:
        say(f" tokens {before} to {now - 1} use untrained rows that padded the checkpoint's vocabulary")


def converted(checkpoint: Checkpoint) -> bool:
    """Return True if a checkpoint was converted from another format and has not been trained since."""
    return checkpoint.payload.get("converted") is True


def _other_data(checkpoint: Checkpoint, override: bool, now: str | None) -> str | None:
    before, consumed = checkpoint.payload.get("data_fingerprint"), checkpoint.payload.get("consumed_samples")
    if override or not consumed or None in (before, now) or before == now:
        return None
    return (
        f"the training data is not the data of its {consumed} consumed samples (fingerprint {before} in the "
        f"checkpoint, {now} in the run), so samples would be repeated or left out: give the same data, split, "
        "seed, sequence length and length of the run, or --override-data-fingerprint to continue with the new data at "
        f"sample {consumed}"
    )


def without_new_tensors(targets: StateDict, checkpoint: Checkpoint) -> StateDict:
    """Remove fp8 histories from the targets if the checkpoint lacks them or stores them with a different length.

    Histories that are not loaded start empty, because a run may turn on fp8 or change the fp8 recipe at any time.
    Optional optimizer states are also removed from the targets if the checkpoint lacks them.
    """

    def saved(key: str) -> bool:
        return key in checkpoint.tensors and checkpoint.tensors[key].shape == tuple(targets[key].shape)

    return {k: target for k, target in targets.items() if not (k.endswith(HISTORY) or _is_optional(k)) or saved(k)}


def _is_optional(key: str) -> bool:
    """Return True if `key` belongs to an optional optimizer state, which a checkpoint may lack and a run may ignore."""
    kinds = (kind for store in STATE_STORES for kind in STATE_STORES.facts(store).optional)
    return key.startswith(tuple(optimizer_key(kind, "") for kind in kinds))


def without_states_of_thawed(targets: StateDict, checkpoint: Checkpoint, say: Callable[[str], None]) -> StateDict:
    """Remove from the targets the optimizer states of parameters that were frozen in the saved run but are trained now.
    The removed states keep their initial value, zero."""
    saved = saved_config(checkpoint)
    missing = [key for key in targets if key.startswith(OPTIMIZER) and key not in checkpoint.tensors]
    frozen = frozen_names(saved) if missing else frozenset()
    thawed = {key for key in missing if _parameter_of(key) in frozen}
    if thawed:
        say(
            f" the checkpoint was saved with {' '.join(_frozen_by(saved))}: optimizer states of "
            "parameters that are trained again start at zero"
        )
    return {key: target for key, target in targets.items() if key not in thawed}


def _frozen_by(saved: RunConfig) -> Iterator[str]:
    """Yield each flag that froze parameters in the saved run, followed by its values."""
    for flag in all_flags():
        if flag.spec.chooses_trained and (values := value_of(saved, flag)):
            yield " ".join([flag.name, *values])


def mismatch_remedy(keys: Sequence[str]) -> str:
    """Return advice if all of `keys` belong to optimizer states; otherwise, return an empty string. `keys` are the keys
    whose tensors do not match the checkpoint. For example, only optimizer states differ if a different version of the
    program updated some parameters with a different optimizer."""
    if not all(key.startswith(OPTIMIZER) for key in keys):
        return ""
    return "; a different optimizer updated these parameters: add --no-load-optim to start with new optimizer states"


def tell_of_other_groups(saved: RunConfig, config: RunConfig, say: Callable[[str], None]) -> None:
    """Report parameters whose learning-rate factor or weight decay differs between the checkpoint's run and this run.
    The run continues with the values of its own flags."""
    if not saved.optimizer.has_own_groups and not config.optimizer.has_own_groups:
        return
    pairs = {
        meta.name: (saved.optimizer.group_of(meta), config.optimizer.group_of(meta))
        for meta in stage_metas(config.model)
    }
    if other := {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}:
        name, (before, now) = next(iter(other.items()))
        what = f"{len(other)} parameters are in a different group than in the checkpoint"
        say(f" {what}; {name}: {before} there, {now} now")


def frozen_names(config: RunConfig) -> frozenset[str]:
    """Return the names of the parameters that a run does not train."""
    if not config.optimizer.parameter_rules:
        return frozenset()
    return frozenset(meta.name for meta in stage_metas(config.model) if config.optimizer.freezes(meta))


def _parameter_of(key: str) -> str:
    """Extract the parameter name from an optimizer key: `decoder.layers.0.mlp.linear_fc1.weight` of
    `optimizer.exp_avg.decoder...`."""
    return key.removeprefix(OPTIMIZER).partition(".")[2]


def unused_tensors(
    checkpoint: Checkpoint, load_optimizer: bool, config: RunConfig | None = None
) -> Callable[[str], bool]:
    """Return a function that returns True for each checkpoint key that the run need not load. The run need not load
    histories, callback states, optional optimizer states, and optimizer states of frozen parameters. If
    `load_optimizer` is False, the run loads no optimizer states. Otherwise, the run loads the main parameter in place
    of a parameter, if the checkpoint contains both.
    """
    frozen = frozenset() if config is None else frozen_names(config)

    def unused(key: str) -> bool:
        if key.startswith(OPTIMIZER):
            return not load_optimizer or _parameter_of(key) in frozen or _is_optional(key)
        if key.endswith(HISTORY) or key.startswith(CALLBACKS):
            return True
        name = key.removeprefix(MODEL)
        return load_optimizer and optimizer_key(MAIN_PARAM, name) in checkpoint.tensors

    return unused


def saved_progress(values: dict[str, Any]) -> Progress:
    """Return the progress in a checkpoint's JSON; missing fields get their defaults. A checkpoint without
    `scheduled_samples` comes from a run whose schedule depended on the consumed samples, so the number of consumed
    samples is used instead."""
    known = {each.name: values[each.name] for each in fields(Progress) if each.name in values}
    known.setdefault("scheduled_samples", values.get("consumed_samples", 0))
    known["running_means"] = tuple(known.get("running_means", ()))
    known["origin"] = known["origin"] if isinstance(known.get("origin"), dict) else {}
    return Progress(**known | {"past_batches": past_batches(values)})
