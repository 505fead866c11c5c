"""Data of a run: the number of samples in each split, and iterators over the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from megatron.core.attention.tiles import DividesSequences
from megatron.core.batch import Batch
from megatron.core.config.data import DatasetConfig
from megatron.core.config.losses import LOSSES
from megatron.core.config.model import TransformerConfig
from megatron.core.datasets.blended import Renumbered, WholeBatches
from megatron.core.datasets.build import Demands, build_datasets, source_lines, split_share
from megatron.core.datasets.dataset import Dataset, Datasets, Dealer, StepShape
from megatron.core.datasets.index_cache import content_hash
from megatron.core.datasets.samplers import DataIterator, MicroBatch, in_order
from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.core.dist_checkpointing.storage import on_first_rank, ranks_without
from megatron.core.parallel_state import Axis
from megatron.core.tokenizers import Tokenizer, build_tokenizer
from megatron.training.config.flags import dashed
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import load_extensions, loaded_extensions
from megatron.training.initialize import Runtime
from megatron.training.metrics.data_sources import SourceNames
from megatron.training.plan import Phase, RunPlan
from megatron.training.progress import Step


class Splits(NamedTuple):
    """Training, validation and test data sets of a phase."""

    train: Dataset
    valid: dict[str, Dataset]
    """Validation sets by name; the unnamed set has the name ""."""

    test: Dataset | None


class EvaluatedSets(dict[str, DataIterator]):
    """Iterators over the data sets of a split, keyed by the name of the set. Looking up a missing name raises
    ValueError with a remedy."""

    def __init__(self, sets: dict[str, DataIterator], split: str, eval_iters: int) -> None:
        super().__init__(sets)
        self.split, self.eval_iters = split, eval_iters

    def __missing__(self, name: str) -> DataIterator:
        flag, what = f"--{self.split}-data-path", {"valid": "validation", "test": "test"}[self.split]
        if not self.eval_iters:
            raise ValueError(
                f"--eval-iters 0: must be at least 1 to evaluate the {what} data; raise it, or evaluate no data"
            )
        if not self:
            raise ValueError(f"there is no {what} data: give --data-path and a --split with a share for it, or {flag}")
        names = ", ".join(each or "the unnamed set" for each in self)
        raise ValueError(
            f"{flag}: {f'no {what} set is named {name}' if name else f'every {what} set has a name'}; use {names}"
        )


@dataclass
class TrainingData:
    """Iterators over the training data of all phases, and over the evaluation data of one phase, which `enter`
    selects."""

    plan: RunPlan
    runtime: Runtime
    train: DataIterator
    splits: list[Splits]
    """Training, validation and test data sets of each phase."""

    fingerprints: list[tuple[int, str]]
    """For each phase, the number of its first sample and the fingerprint of its training data."""

    sources: SourceNames
    """Index and name of each data source."""

    valid: dict[str, DataIterator] = field(default_factory=dict)
    test: DataIterator | None = None
    """Iterator over the test set, or None if there is no test set or no evaluation."""

    watchers: list[Callable[[Step, Sequence[MicroBatch]], None]] = field(default_factory=list)
    """Hooks called with this rank's micro-batches of each training step, before context parallelism shards them."""

    def __post_init__(self) -> None:
        self.enter(self.plan.phases[0])

    def read_batches(self, step: Step, watched: bool = False) -> list[Batch]:
        """Return this rank's micro-batches of a training step, on its device. If `watched` is True, the hooks in
        `watchers` are called first. In this case, `read_batches` is collective if there are any hooks."""
        taken = self.train.next_step(step.first_sample, step.samples)
        for watch in self.watchers if watched else ():
            watch(step, taken)
        return put_on_device(taken, self.model, self.runtime, self.divide)

    def evaluated(self, split: str) -> dict[str, DataIterator]:
        """Return a dict from the name of each "valid" or "test" set of the current phase to its iterator. The name of
        an unnamed set is "".

        The result is empty if there is nothing to evaluate. Looking up a set that does not exist raises ValueError."""
        sets = self.valid if split == "valid" else {"": self.test} if self.test is not None else {}
        return EvaluatedSets(sets, split, self.eval_iters)

    def add_source_ids(self) -> None:
        """Add the data source index of each sample to all further micro-batches (`Batch.source_ids`)."""
        for each in self._iterators():
            each.with_sources = True

    def _iterators(self) -> list[DataIterator]:
        return [each for each in (self.train, *self.valid.values(), self.test) if each is not None]

    def fingerprint_at(self, consumed_samples: int) -> str:
        """Return a fingerprint of the first `consumed_samples` samples."""
        begun = [each for each in self.fingerprints if each[0] < max(1, consumed_samples)]
        return begun[0][1] if len(begun) == 1 else content_hash({"stages": begun})

    def enter(self, phase: Phase) -> None:
        """Switch to a phase. From now on, evaluations use the data of this phase, and batches have the format of its
        model."""
        self.model, number = phase.config.model, self.plan.phases.index(phase)
        self.train.deal, self.divide = dealer_of(phase.config), divider_of(phase.config)
        for each in self._iterators()[1:]:
            each.close()
        self.valid, self.test = {}, None
        self.eval_iters = phase.config.training.eval_iters
        if self.eval_iters:
            made = partial(iterator, config=phase.config, runtime=self.runtime)
            sets, test = self.splits[number].valid, self.splits[number].test
            self.valid = {name: made(each, name=f"validation {name}".strip()) for name, each in sets.items()}
            self.test = None if test is None else made(test, name="test")
        if self.train.with_sources:
            self.add_source_ids()

    def close(self) -> None:
        for each in self._iterators():
            each.close()


def iterator(dataset: Dataset, config: RunConfig, runtime: Runtime, name: str) -> DataIterator:
    return DataIterator(
        dataset,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=runtime.state.dp.rank,
        dp_size=runtime.state.dp.size,
        num_workers=config.data.num_workers,
        name=name,
        pin_memory=runtime.device.type == "cuda",
    )


@runtime_checkable
class DealsSamples(Protocol):
    """Base class of extension flags that may select a dealer. A dealer assigns the samples of a training step to
    data-parallel replicas."""

    def dealer(self, seq_length: int) -> Dealer | None:
        """Return the dealer for samples with `seq_length` tokens, or None if these flags select no dealer."""


def dealer_of(config: RunConfig) -> Dealer:
    """Return the dealer that the flags select. A dealer assigns the samples of a training step to data-parallel
    replicas."""
    asked = [
        options.dealer(config.model.seq_length)
        for options in config.extension_options
        if isinstance(options, DealsSamples)
    ]
    return next((deal for deal in asked if deal is not None), in_order)


@runtime_checkable
class DividesSamples(Protocol):
    """Base class of extension flags that may change how training samples are divided over context-parallel ranks."""

    def divider(self, config: RunConfig) -> DividesSequences | None:
        """Return the object that divides sequences over ranks, or None if the flags select no such object."""


def divider_of(config: RunConfig) -> DividesSequences | None:
    """Return the object that divides training samples over context-parallel ranks, or None for the default zig-zag
    division."""
    asked = (each.divider(config) for each in config.extension_options if isinstance(each, DividesSamples))
    return next((divide for divide in asked if divide is not None), None)


def build_data(plan: RunPlan, runtime: Runtime) -> tuple[TrainingData, RunPlan]:
    """Build the run's data, and complete the run's plan. If the run is one epoch, its length is known only when the
    data are built.

    Raises ValueError for any problem with the data that the flags select.
    """
    told: set[str] = set()

    def say(line: str) -> None:
        if line not in told:
            runtime.say(f"data: {line}")
        told.add(line)

    plan, sources = _with_length(plan), SourceNames()
    demands = Demands(longest=max(phase.config.model.seq_length for phase in plan.phases), say=say)
    splits: list[Splits] = []
    for phase in plan.phases:
        splits.append(_splits(plan, phase, demands, sources))
        data, length = with_tokens(phase.config), phase.config.model.seq_length
        batch, step = phase.config.training.global_batch_size, None
        if batch is not None:
            ranks = phase.config.parallel.ranks_by_queries
            step = StepShape(batch, runtime.state.dp.size, phase.config.training.micro_batch_size, ranks)
        for line in (*plan.lines(phase), *source_lines(data, phase.samples, length, step)):
            runtime.say(f"data: {line}")
    dataset = plan.training_set([each.train for each in splits])
    made = TrainingData(
        plan,
        runtime,
        iterator(dataset, plan.phases[0].config, runtime, "training"),
        splits,
        [(phase.first_sample, each.train.fingerprint) for phase, each in zip(plan.phases, splits, strict=True)],
        sources,
    )
    return made, plan


def _splits(plan: RunPlan, phase: Phase, demands: Demands, sources: SourceNames) -> Splits:
    """Build the datasets of a phase. Each training source continues at the sample at which earlier phases stopped."""
    config = phase.config
    training = phase.config.training
    order = demands.order
    # The number of requested evaluation samples is the same as in Megatron-LM, because the sample order depends on this
    # number.
    once = training.eval_iters * training.eval_batch_size
    for_valid = None if training.full_validation else (plan.iterations // training.eval_interval + 1) * once
    order.planned = phase.planned
    order.take_up = phase.take_up
    order.present = []
    # Any other dataset returns sample `i` of the run for index `i`.
    size = phase.samples if config.data.dataset == "gpt" else plan.samples
    made = _build(config, (size, for_valid, once), demands)
    if made.train is None:
        raise ValueError(
            "there is no training data: give --data-path and a --split with a share for training, or --train-data-path"
        )
    if len(made.train) < phase.samples:  # without weights, the data sets of --data-path are read once
        raise ValueError(
            f"the training data has {len(made.train)} samples of {config.model.seq_length} tokens, but the run "
            f"needs {phase.samples}: several --data-path prefixes without weights are read once; give each a "
            "weight to repeat its data, or train for less"
        )
    order.take(made.train, phase.samples)
    train, valid, test = _wrapped(config, made)
    assert train is not None
    numbers = sources.numbers(config.data, "train")
    for source, number in zip(order.present, numbers, strict=False):
        sources.tokens[number] = source.tokens
    train = Renumbered(train, numbers, sources.names if config.data.dataset == "gpt" else None)
    valid = valid and Renumbered(valid, sources.numbers(config.data, "valid"))
    test = test and Renumbered(test, sources.numbers(config.data, "test"))
    sets = {"": valid} | {name: _build_set(config, at, for_valid) for name, at in config.data.named_sets.items()}
    if training.full_validation:
        sets = {name: each and WholeBatches(each, training.eval_batch_size) for name, each in sets.items()}
    return Splits(train, {name: each for name, each in sets.items() if each is not None}, test)


def check_same_data(fingerprints: list[tuple[int, str]], world: Axis) -> None:
    """Raise ValueError on every rank if ranks found different training data under the same paths. The data differ, for
    example, if hosts have copies of different versions. Collective over `world`.
    """
    first = on_first_rank(lambda: fingerprints, world)
    if different := ranks_without([tuple(each) for each in first] == fingerprints, world):
        raise ValueError(
            f"the training data is not the same on all hosts: {different} found different data from rank 0 under the "
            "same paths; copy one version with its index files to all hosts, or read it from a shared file system"
        )


def _with_length(plan: RunPlan) -> RunPlan:
    """Return the plan, with the run's length filled in if the run is one epoch of the data."""
    last = plan.phases[-1]
    if last.end is not None:
        return plan
    config, training = last.config, last.config.training
    # The requested splits determine whether the tokens of one data set are divided among several splits.
    needed = (True, training.eval_iters > 0 or training.full_validation, training.eval_iters > 0)
    train = _build(config, (None, 0, 0), Demands(needed=needed)).train
    assert train is not None
    if not plan.sizes.iterations(len(train)):
        raise ValueError(
            f"--global-batch-size {training.global_batch_size} must be at most one epoch of the training data, "
            f"{len(train)} samples of {config.model.seq_length} tokens; "
            "make it smaller, or set the length with --train-iters"
        )
    return replace(plan, phases=(*plan.phases[:-1], replace(last, end=len(train))))


def with_tokens(config: RunConfig) -> DatasetConfig:
    """Replace text files in the data flags with indexed datasets. Datasets that do not exist yet are built.

    If text files have problems, the function raises a ValueError that lists all of them.
    """
    prepare = partial(load_extensions, loaded_extensions())
    if config.data.dataset != "gpt":
        return config.data
    told = config.data, config.tokenizer, config.model.vocab_size, prepare
    replaced: dict[str, Any] = {}
    problems = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = list(getattr(config.data, name) or ())
        for place, word in enumerate(words):
            path, share = split_share(word)
            if (kind := data_kind_of(path)) is not None:
                try:
                    words[place] = kind.reader(*told).prefix(dashed(name), path)
                except ValueError as error:
                    problems.append(str(error))
                else:
                    words[place] += "" if share is None else f"@{share[0]}:{share[1]}"
                    replaced[name] = tuple(words)
    if problems:
        raise ValueError("\n".join(problems))
    return replace(config.data, **replaced)


def _build(
    config: RunConfig, sizes: tuple[int | None, int | None, int | None], demands: Demands | None = None
) -> Datasets:
    """Build the data that the flags select, except named validation sets. The wrappers of extensions (`WrapsDatasets`)
    are not applied."""
    named, data = config.tokenizer, config.data
    if data.multiple_validation_sets:
        config = replace(config, data=replace(data, valid_data_path=None))
    tokenizer = build_tokenizer(named, config.model.vocab_size) if named.tokenizer_type else None
    return build_datasets(
        replace(with_tokens(config), reset_position_ids=config.restarts_positions),
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        sizes=sizes,
        eod=tokenizer.eod if tokenizer is not None else None,
        vocab_size=config.model.vocab_size,
        demands=demands,
    )


@runtime_checkable
class WrapsDatasets(Protocol):
    """Base class of extension flags, registered with `part_of="data"`, that change the samples of data sets."""

    def wrapped(self, dataset: Dataset, config: DatasetConfig, tokenizer: Tokenizer | None, seed: int) -> Dataset:
        """Return a data set that wraps `dataset` and changes its samples. Return `dataset` itself if no sample
        changes."""


def _wrapped(config: RunConfig, datasets: Datasets) -> Datasets:
    """Wrap each data set in the wrappers that extension flags provide (`WrapsDatasets`)."""
    wrappers = [options for options in config.data.extension_options if isinstance(options, WrapsDatasets)]
    for options in wrappers:
        named = config.tokenizer
        tokenizer = build_tokenizer(named, config.model.vocab_size) if named.tokenizer_type else None
        told = config.data, tokenizer, config.training.seed
        datasets = Datasets(*(each and options.wrapped(each, *told) for each in datasets))
    return datasets


def _build_set(config: RunConfig, prefix: str, samples: int | None) -> Dataset | None:
    """Build one validation set."""
    alone = replace(config.data, data_path=None, train_data_path=None, test_data_path=None)
    data = replace(alone, valid_data_path=(prefix,), multiple_validation_sets=False)
    config = replace(config, data=data)
    return _wrapped(config, _build(config, (0, samples, 0))).valid


def put_on_device(
    batches: list[MicroBatch], config: TransformerConfig, runtime: Runtime, divide: DividesSequences | None = None
) -> list[Batch]:
    """Prepare a step's micro-batches for the model. First call the `prepare` function of the loss, which may change the
    labels and masks of whole samples. Then take this context-parallel rank's part of each sample, and copy it to the
    device."""
    fields: list[dict[str, Any]] = [dict(batch) for batch in batches]
    prepare = LOSSES[config.loss_func].prepare
    whole = [prepare(config, Batch(**values)).with_future(config.mtp_depths) for values in fields]
    return [batch.local_to(runtime.state.cp, divide).to(runtime.device) for batch in whole]
