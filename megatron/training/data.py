"""The data of a run: how many samples each split needs, and an iterator over each."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.batch import Batch
from megatron.core.config.data import DatasetConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.datasets.build import Datasets, Demands, TrainingOrder, build_datasets, parse_blend, split_share
from megatron.core.datasets.gpt_dataset import Dataset
from megatron.core.datasets.index_cache import content_hash
from megatron.core.datasets.samplers import DataIterator, MicroBatch
from megatron.core.datasets.sources import source_lines
from megatron.core.datasets.staged import From, Renumbered, StagedDataset
from megatron.core.datasets.whole_batches import WholeBatches
from megatron.core.dist_checkpointing.path_kind import TEXTS, kind_of
from megatron.core.dist_checkpointing.shared_folder import ranks_without
from megatron.core.dist_checkpointing.storage import on_first_rank
from megatron.core.parallel_state import Axis
from megatron.core.parts import LOSSES
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.phases.plan import StagePlan
from megatron.extensions.phases.printed import stage_lines
from megatron.extensions.text_data.fill_in_middle import FillInMiddle
from megatron.extensions.text_data.tokenized import TextData
from megatron.training.config.flags import dashed
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import load_extensions
from megatron.training.initialize import Runtime
from megatron.training.metrics.epochs import Epochs
from megatron.training.metrics.sample_log import SampleLog
from megatron.training.progress import Step


@dataclass
class TrainingData:
    """Iterators over the splits; None for a split that is not used. They are those of one stage: `enter` changes it."""

    model: TransformerConfig
    runtime: Runtime
    train: DataIterator
    valid: dict[str, DataIterator]
    """Validation sets by name; "" is the one that has none."""

    test: DataIterator | None
    fingerprints: list[tuple[int, str]]
    """(first sample, fingerprint) of the training data of each stage."""

    plan: StagePlan
    epochs: Epochs
    sets: list[dict[str, Dataset]] = field(default_factory=list)
    """Validation sets of each stage."""

    tests: list[Dataset | None] = field(default_factory=list)
    logged_sources: list[str] = field(default_factory=list)
    """Names of all sources under --log-source-loss."""

    sample_log: SampleLog | None = None
    """None without --sample-log."""

    def read_batches(self, step: Step, log: bool = False) -> list[Batch]:
        """This rank's micro-batches of a training step, on its device. Collective with `log`, for --sample-log."""
        taken = self.train.next_step(step.first_sample, step.samples)
        if log and self.sample_log is not None:
            self.sample_log.write(step.iteration, taken)
        return put_on_device(taken, self.model, self.runtime)

    def fingerprint_at(self, consumed_samples: int) -> str:
        """Equal if the first `consumed_samples` samples are the same."""
        begun = [each for each in self.fingerprints if each[0] < max(1, consumed_samples)]
        return begun[0][1] if len(begun) == 1 else content_hash({"stages": begun})

    def enter(self, number: int) -> None:
        """Goes on with the data of a stage."""
        stage = self.plan.stages[number]
        self.model, training = stage.config.model, stage.config.training
        if len(self.plan.stages) > 1:
            self.train.restrict(stage.end or 0, training.micro_batch_size)
        for each in (*self.valid.values(), self.test):
            if each is not None:
                each.close()
        self.valid, self.test = {}, None
        if training.eval_iters:
            for name, dataset in self.sets[number].items():
                self.valid[name] = iterator(dataset, stage.config, self.runtime, f"validation {name}".strip())
            if (test := self.tests[number]) is not None:
                self.test = iterator(test, stage.config, self.runtime, "test")

    def close(self) -> None:
        for each in (self.train, *self.valid.values(), self.test, self.sample_log):
            if each is not None:
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
        with_sources=config.logging.log_source_loss,
    )


def build_data(plan: StagePlan, runtime: Runtime) -> tuple[TrainingData, StagePlan]:
    """The data, and the plan with the length of the run: known only now where it is one epoch long.

    Raises ValueError for whatever is wrong with the data the flags name.
    """
    told: set[str] = set()

    def say(line: str) -> None:
        if line not in told:
            runtime.say(f"data: {line}")
        told.add(line)

    plan = _with_length(plan)
    sources = SourceNames()
    order, longest = TrainingOrder(), max(stage.config.model.seq_length for stage in plan.stages)
    parts: list[Dataset] = []
    sets: list[dict[str, Dataset]] = []
    tests: list[Dataset | None] = []
    for stage in plan.stages:
        config, training = stage.config, stage.config.training
        # Evaluation takes as many as Megatron-LM counts: the order of their samples depends on it.
        once = training.eval_iters * training.eval_batch_size
        for_valid = None if training.full_validation else (plan.iterations // training.eval_interval + 1) * once
        order.planned, order.anew, order.present = stage.planned, stage.starts_anew, []
        whole = plan.numbered_by_run and len(plan.stages) > 1
        size = plan.samples if whole else stage.samples
        made = _build(config, (size, for_valid, once), Demands(order, longest=longest, say=say))
        if made.train is None:
            raise ValueError(
                "there is no training data: give --data-path a --split with a share for training, or --train-data-path"
            )
        if len(made.train) < stage.samples:  # the run would go on after the data: a blend without weights has one epoch
            raise ValueError(
                f"the training data has {len(made.train)} samples of {config.model.seq_length} tokens and the run "
                f"takes {stage.samples}: several --data-path prefixes without weights are read once; give each a "
                "weight, which repeats the data, or train for less"
            )
        order.take(made.train, stage.samples)
        train, valid, test = _filled_in(config, made)
        assert train is not None
        train = From(train, stage.first_sample) if whole and stage.first_sample else train
        numbers = sources.numbers(config.data, "train")
        for source, number in zip(order.present, numbers, strict=False):
            sources.tokens[number] = source.tokens
        parts.append(train if len(numbers) == 1 == len(plan.stages) else Renumbered(train, numbers))
        valid = valid and Renumbered(valid, sources.numbers(config.data, "valid"))
        test = test and Renumbered(test, sources.numbers(config.data, "test"))
        of_stage = {"": valid} | {
            name: _build_set(config, at, for_valid) for name, at in config.data.named_sets.items()
        }
        if training.full_validation:
            of_stage = {n: each and WholeBatches(each, training.eval_batch_size) for n, each in of_stage.items()}
        sets.append({name: each for name, each in of_stage.items() if each is not None})
        tests.append(test)
        for line in (
            *stage_lines(plan, stage),
            *source_lines(with_tokens(config), stage.samples, config.model.seq_length),
        ):
            runtime.say(f"data: {line}")
    firsts = [stage.first_sample for stage in plan.stages]
    dataset = parts[0] if len(parts) == 1 else StagedDataset(firsts, parts, plan.samples)
    data = TrainingData(
        plan.stages[0].config.model,
        runtime,
        iterator(dataset, plan.stages[0].config, runtime, "training"),
        {},
        None,
        [(first, part.fingerprint) for first, part in zip(firsts, parts, strict=True)],
        plan,
        Epochs(plan, dataset, *sources.sized()),
        sets,
        tests,
        sources.names if plan.base.logging.log_source_loss else [],
    )
    return data, plan


def check_same_data(fingerprints: list[tuple[int, str]], world: Axis) -> None:
    """Raises ValueError, on every rank, if other ranks found other training data under the same paths: a host with a
    copy of its own may have another version. Collective over `world`."""
    first = on_first_rank(lambda: fingerprints, world)
    if different := ranks_without([tuple(each) for each in first] == fingerprints, world):
        raise ValueError(
            f"the training data is not the same on all hosts: {different} found other data than rank 0 under the same "
            "paths; copy one version to all, with its index files, or read it from a file system that they share"
        )


class SourceNames:
    """Numbers and names of the data sets of a run: a path is one source, in whichever stage and split."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.names: list[str] = []
        self.tokens: dict[int, int] = {}
        """Tokens of an epoch of those that are trained on."""

    def numbers(self, config: DatasetConfig, split: str) -> list[int]:
        """Number of each source of a split's blend, in its order."""
        values = getattr(config, f"{split}_data_path") if config.per_split else config.data_path
        paths = parse_blend("--data-path", values).prefixes if values and config.dataset == "gpt" else [config.dataset]
        return [self._number(path) for path in paths]

    def sized(self) -> tuple[list[str], list[int]]:
        """(names, tokens of an epoch) of all sources; nothing where there are no epochs. Sources that are not trained
        on have one token."""
        if not self.tokens:
            return [], []
        return self.names, [self.tokens.get(number, 1) or 1 for number in range(len(self.names))]

    def _number(self, path: str) -> int:
        if path not in self.paths:
            name = re.sub(r"[^\w.-]+", "-", Path(path.rstrip("/")).name)
            others = sum(each == name or each.startswith(f"{name}-") for each in self.names)
            self.paths.append(path)
            self.names.append(f"{name}-{others + 1}" if others else name)
        return self.paths.index(path)


def _with_length(plan: StagePlan) -> StagePlan:
    """The plan with the end of the run where this is one epoch of the data."""
    last = plan.stages[-1]
    if last.end is not None:
        return plan
    config, training = last.config, last.config.training
    # Whether tokens are divided follows from the splits that are needed.
    needed = (True, training.eval_iters > 0 or training.full_validation, training.eval_iters > 0)
    train = _build(config, (None, 0, 0), Demands(needed=needed)).train
    assert train is not None
    if not plan.sizes.iterations(len(train)):
        raise ValueError(
            f"--global-batch-size {training.global_batch_size} must be at most one epoch of the training data, "
            f"{len(train)} samples of {config.model.seq_length} tokens; "
            "make it smaller, or say how long to train with --train-iters"
        )
    return replace(plan, stages=(*plan.stages[:-1], replace(last, end=len(train))))


def with_tokens(config: RunConfig) -> DatasetConfig:
    """The data of the flags, text files replaced by the indexed datasets of their tokens. Tokenizes them if no run has.

    Raises ValueError with what is wrong with any of them.
    """
    prepare = partial(load_extensions, config.extensions.extension or ())
    if config.data.dataset != "gpt":
        return config.data
    made = TextData(config.data, config.tokenizer, config.model.vocab_size, prepare)
    replaced: dict[str, Any] = {}
    problems = []
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = list(getattr(config.data, name) or ())
        for place, word in enumerate(words):
            path, share = split_share(word)
            if kind_of(path) in TEXTS:
                try:
                    words[place] = made.prefix(dashed(name), path)
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
    """The data of the flags but for validation sets with names, nothing filled in."""
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


def _filled_in(config: RunConfig, datasets: Datasets) -> Datasets:
    """Fill-in-the-middle samples of data sets, if the flags ask for them."""
    named, fim, seed = config.tokenizer, config.fill_in_middle, config.training.seed
    if not fim.fim_data:
        return datasets
    tokenizer = build_tokenizer(named, config.model.vocab_size)
    return Datasets(*(each and FillInMiddle(each, fim, tokenizer, seed) for each in datasets))


def _build_set(config: RunConfig, prefix: str, samples: int | None) -> Dataset | None:
    """One validation set."""
    alone = replace(config.data, data_path=None, train_data_path=None, test_data_path=None)
    data = replace(alone, valid_data_path=(prefix,), multiple_validation_sets=False)
    config = replace(config, data=data)
    return _filled_in(config, _build(config, (0, samples, 0))).valid


def put_on_device(batches: list[MicroBatch], config: TransformerConfig, runtime: Runtime) -> list[Batch]:
    """A step's micro-batches as the model takes them: with the labels and masks that the loss makes of whole samples,
    this rank's part of each."""
    fields: list[dict[str, Any]] = [dict(batch) for batch in batches]
    prepare = LOSSES[config.loss_func].prepare
    whole = [prepare(config, Batch(**values)).with_future(config.mtp_depths) for values in fields]
    return [batch.local_to(runtime.state.cp).to(runtime.device) for batch in whole]
