"""Training phases that a phase file defines. For each phase, this module computes the first sample, token and
iteration. If the sequence length changes, this module also divides the unused rest of each training data source into
samples of the new length. This module does not import torch.

A step is never divided between two phases, so a phase begins with the first step at or after the start position in the
phase file. If the sequence length changes, the first sample of the new phase begins with the first token that no
earlier sample used as input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.core.config.optimizer import OptimizerConfig
from megatron.core.datasets.gpt_dataset import DocumentSamples, Pieces
from megatron.core.datasets.index_cache import IndexCache, content_hash
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.source_order import SourceOrder
from megatron.extensions.data.phases.flags import PhasesConfig
from megatron.extensions.data.phases.phase_file import (
    DATA,
    LR_FRACTIONS,
    LR_LENGTHS,
    LR_SHAPE,
    POSITIONS,
    SIZES,
    PhaseEntry,
    read_phases,
)
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.flags import config_of_sections, flat_values, with_named
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.plan import Phase


def cut_anew(source: SourceOrder, format: SampleFormat) -> None:
    """Divide the unused rest of a data source into samples of the new sequence length, if the new phase changes the
    sequence length."""
    if not source.segments or source.segments[0].format.seq_length == format.seq_length:
        return
    rest = _rest(source)
    source.restart()
    if rest is not None and rest.tokens > format.seq_length:
        source.add(rest, None, format)


def _rest(source: SourceOrder) -> Pieces | None:
    """Return the parts of documents that the current segment of a data source has not used yet. A source's sample order
    consists of segments. The current segment is the segment of which some, but not all, samples were consumed. Return
    None if there is no current segment."""
    taken = source.taken
    for segment in source.segments:
        if taken < len(segment):
            return rest_of(segment, taken, source.cache) if taken else None
        taken -= len(segment)
    return None


def rest_of(segment: DocumentSamples, taken: int, cache: IndexCache) -> Pieces:
    """Return the parts of documents that remain in a segment after its first `taken` samples. One process per node
    computes these parts and caches them in index files."""
    made_of = {"segment": segment.fingerprint, "taken": taken}
    names = ("documents", "starts", "lengths")
    documents, starts, lengths = cache.arrays(names, "Pieces", made_of, lambda: segment.rest(taken))
    return Pieces(documents, starts, lengths, content_hash(made_of))


COMPARED = (*DATA, *POSITIONS, "global_batch_size")
"""Configuration fields of a phase that must not change once the phase has begun."""

NO_LENGTHS: Mapping[str, float | None] = dict.fromkeys(LR_LENGTHS) | {
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    **dict.fromkeys(LR_FRACTIONS),
}


def values_of(config: RunConfig, entry: PhaseEntry | None = None) -> dict[str, object]:
    """Return the properties of a phase that must not change once the phase has begun. `entry` is None for a run without
    phases. Paths of data sets are reduced to their file names, so that data sets may be moved to a different folder."""
    values = flat_values(config)
    found: dict[str, object] = {field: values[field] for field in COMPARED if field in values}
    found["data_path"] = [Path(word.rstrip("/")).name for word in values["data_path"] or ()]
    shape, anew = (entry.values, entry.anew) if entry is not None else ((), False)
    found |= {field: value for field, value in shape if field in (*LR_SHAPE, *LR_LENGTHS)}
    return found | {"starts_anew": anew if isinstance(anew, bool) else list(anew)}


@dataclass(frozen=True, kw_only=True)
class FilePhase(Phase):
    """Part of a run with one data blend, sequence length, batch size and learning-rate schedule."""

    entry: PhaseEntry
    """Entry of the --data-phases file that defines this phase."""

    first_iteration: int
    """Number of iterations before the phase begins."""

    optimizer: OptimizerConfig | None = None
    """Learning-rate schedule of the phase, in samples from the phase's beginning. None means that the run's schedule
    continues."""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def values(self) -> dict[str, object]:
        return values_of(self.config, self.entry)

    def take_up(self, source: SourceOrder, prefix: str, format: SampleFormat) -> None:
        anew = self.entry.anew
        if anew if isinstance(anew, bool) else prefix in anew:
            source.restart()
        cut_anew(source, format)


def planned_phases(config: RunConfig) -> tuple[tuple[tuple[FilePhase, ...], BatchSizes] | None, list[Problem]]:
    """Return a pair (plan, problems) for a resolved configuration. The plan contains the phases and the batch sizes,
    and is None if they cannot be determined. The problems describe errors in the phases."""
    path = config.options(PhasesConfig).data_phases
    assert path is not None
    entries, wrong = read_phases(path)
    problems = list(wrong)
    if not entries or not config.training.global_batch_size or config.model.seq_length < 1:
        # Other flag rules report these missing or invalid values.
        return None, problems
    if any(not _positive(entry) for entry in entries):
        return None, problems
    phases, sizes, found = _walk(config, [_in_units(config, entry) for entry in entries])
    problems += found
    end = _end(config, phases, sizes)
    if end is None:
        remedy = "add --train-iters, --train-samples or --train-tokens"
        problems.append(Problem("--data-phases", path, "the run needs a length", remedy))
        return None, problems
    for phase in phases[1:]:
        if phase.first_sample >= end:
            rule = f"begins at sample {phase.first_sample:,}, but the run ends at sample {end:,}"
            remedy, where = "begin it earlier, remove it, or train longer", phase.entry.where
            problems.append(Problem(f"{where}: from-{phase.entry.unit}", phase.entry.start, rule, remedy))
    ends = [*(phase.first_sample for phase in phases[1:]), max(end, phases[-1].first_sample + 1)]
    phases = [_with_schedule(replace(phase, end=stop), config) for phase, stop in zip(phases, ends, strict=True)]
    return (None if found else (tuple(phases), sizes)), problems


def _positive(entry: PhaseEntry) -> bool:
    numbers = [entry.whole(field) for field in ("seq_length", *SIZES)]
    return all(number is None or number > 0 for number in numbers)


def _in_units(config: RunConfig, entry: PhaseEntry) -> PhaseEntry:
    """If the start position of `entry` is a fraction of the run, convert it to the unit in which the run's length is
    given."""
    t = config.training
    if entry.unit != "fraction":
        return entry
    for unit, length in (("iterations", t.train_iters), ("tokens", t.train_tokens), ("samples", t.train_samples)):
        if length is not None:
            return replace(entry, unit=unit, start=round(entry.start * length))
    # The start does not matter, because another rule reports that the run has no length.
    return replace(entry, unit="samples", start=0)


def _walk(config: RunConfig, entries: Sequence[PhaseEntry]) -> tuple[list[FilePhase], BatchSizes, list[Problem]]:
    """Return the phases that `entries` define, the batch sizes of the run, and the problems found. The ends and the
    learning-rate schedules of the phases are not set yet."""
    phases: list[FilePhase] = []
    problems: list[Problem] = []
    own_sizes = any(entry.whole("global_batch_size") for entry in entries)
    sizes = BatchSizes.from_config(config)
    for entry in entries:
        own = _config_of(config, entry)
        if not phases:
            first = FilePhase(own, entry=entry, first_iteration=0)
        else:
            first = replace(_beginning(phases[-1], entry, sizes), config=own)
            if first.first_sample <= phases[-1].first_sample:
                rule = f"must be after the beginning of phase {phases[-1].name}, sample {phases[-1].first_sample:,}"
                problems.append(Problem(f"{entry.where}: from-{entry.unit}", entry.start, rule, "use a larger number"))
        if own_sizes:
            size = own.training.global_batch_size
            assert size is not None
            ended = ((first.first_sample, sizes.final),) if phases else ()
            sizes = BatchSizes(size, (*(sizes.earlier if phases else ()), *ended), sizes.past)
        phases.append(first)
    return phases, sizes, problems


def _beginning(before: FilePhase, entry: PhaseEntry, sizes: BatchSizes) -> FilePhase:
    """Return the phase that `entry` describes and that follows the phase `before`. The phase begins with the first step
    at or after the start position that `entry` specifies."""
    length, start = before.config.model.seq_length, int(entry.start)
    if entry.unit == "iterations":
        iterations = max(start, 0)
    else:
        target = start
        if entry.unit == "tokens":
            target = before.first_sample + -(-(start - before.first_token) // length)
        iterations = sizes.iterations(max(target, 0))
        iterations += sizes.samples(iterations) < target
    sample = sizes.samples(iterations)
    token = before.first_token + (sample - before.first_sample) * length
    return FilePhase(before.config, sample, token, entry=entry, first_iteration=iterations)


def _config_of(config: RunConfig, entry: PhaseEntry) -> RunConfig:
    """Return the run's configuration with all changes that a phase makes, except for changes of the learning rate."""
    new = {field: value for field, value in entry.values if field in (*DATA, *SIZES, *POSITIONS)}
    if "data_path" in new:
        config = config.without("data_args_path")
    length, limit = entry.whole("seq_length") or 0, config.model.max_position_embeddings
    if limit is not None and length > limit and config.model.position_embedding_type != "learned_absolute":
        new["max_position_embeddings"] = length
    training = config.training
    micro = entry.whole("micro_batch_size") or training.micro_batch_size
    size = entry.whole("global_batch_size") or training.global_batch_size
    assert size is not None
    step = micro * (config.parallel.data_parallel_size or 1)
    if (micro, size) != (training.micro_batch_size, training.global_batch_size):
        new["num_microbatches"] = size // step if size % step == 0 else None
    made = config_of_sections({"": flat_values(config) | new | {"data_phases": None}})
    return replace(made, given=config.given, past_batches=config.past_batches)


def _with_schedule(phase: FilePhase, config: RunConfig) -> FilePhase:
    """Return a copy of the phase with the learning-rate schedule that its file entry defines, converted to samples. If
    the entry defines no schedule, return the phase unchanged."""
    if not phase.entry.own_lr:
        return phase
    given = dict(phase.entry.values)
    fields: dict[str, object] = {**NO_LENGTHS, **{field: given[field] for field in LR_SHAPE if field in given}}
    size = phase.config.training.global_batch_size
    assert size is not None
    for part in ("warmup", "decay", "wsd_decay"):
        for unit in ("iters", "samples", "tokens"):
            value = phase.entry.whole(f"lr_{part}_{unit}")
            if value is not None:
                samples = {"iters": value * size, "samples": value}.get(unit, value // phase.config.model.seq_length)
                fields[f"lr_{part}_samples"] = samples
    fields.setdefault("lr_warmup_init", 0.0)
    return replace(phase, optimizer=with_named(config, fields).optimizer)


def _end(config: RunConfig, phases: Sequence[FilePhase], sizes: BatchSizes) -> int | None:
    """Return the number of samples in the whole run. If several flags limit the run, return the smallest of the
    resulting numbers; if no flag limits it, return None."""
    training, last = config.training, phases[-1]
    ends = []
    if training.train_tokens is not None:
        behind = training.train_tokens - last.first_token
        ends.append(last.first_sample + behind // last.config.model.seq_length)
    if training.train_samples is not None:
        ends.append(training.train_samples)
    if training.train_iters is not None:
        ends.append(sizes.samples(training.train_iters))
    return min(ends, default=None)
