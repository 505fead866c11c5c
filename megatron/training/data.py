"""The data of a run: how many samples each split needs, and an iterator over each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron.core.batch import Batch
from megatron.core.config.data import DatasetConfig
from megatron.core.config.model import TransformerConfig
from megatron.core.datasets.build import Datasets, build_datasets, split_share
from megatron.core.datasets.fill_in_middle import FillInMiddle
from megatron.core.datasets.gpt_dataset import Dataset
from megatron.core.datasets.samplers import DataIterator, MicroBatch
from megatron.core.datasets.sources import source_lines
from megatron.core.datasets.whole_batches import WholeBatches
from megatron.core.parts import LOSSES
from megatron.core.text_files.tokenized import TextData, is_text
from megatron.core.tokenizers import build_tokenizer
from megatron.training.config.batch_size import BatchSizes
from megatron.training.config.flags import dashed
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import load_extensions
from megatron.training.initialize import Runtime
from megatron.training.metrics.sample_log import SampleLog
from megatron.training.progress import Step


@dataclass
class TrainingData:
    """Iterators over the splits; None for a split that is not used."""

    model: TransformerConfig
    runtime: Runtime
    train: DataIterator
    valid: dict[str, DataIterator]
    """Validation sets by name; "" is the one that has none."""

    test: DataIterator | None
    fingerprint: str
    """Equal if the same sample number means the same training sample."""

    sample_log: SampleLog | None = None
    """None without --sample-log."""

    def read_batches(self, step: Step, log: bool = False) -> list[Batch]:
        """This rank's micro-batches of a training step, on its device. Collective with `log`, for --sample-log."""
        taken = self.train.next_step(step.first_sample, step.samples)
        if log and self.sample_log is not None:
            self.sample_log.write(step.iteration, taken)
        return put_on_device(taken, self.model, self.runtime)

    def close(self) -> None:
        for each in (self.train, *self.valid.values(), self.test, self.sample_log):
            if each is not None:
                each.close()


def build_data(config: RunConfig, runtime: Runtime, batch_sizes: BatchSizes) -> tuple[TrainingData, int]:
    """The data, and the iterations of the run: known only now where it is one epoch long.

    Raises ValueError for whatever is wrong with the data the flags name.
    """
    training = config.training
    samples = training.train_samples if training.train_iters is None else batch_sizes.samples(training.train_iters)
    if samples is None:
        train = _build(config, (None, 0, 0)).train
        assert train is not None
        samples = len(train)
        if not batch_sizes.iterations(samples):
            raise ValueError(
                f"--global-batch-size {training.global_batch_size} must be at most one epoch of the training data, "
                f"{samples} samples of {config.model.seq_length} tokens; "
                "make it smaller, or say how long to train with --train-iters"
            )
    iterations = training.train_iters if training.train_iters is not None else batch_sizes.iterations(samples)
    # Evaluation takes as many as Megatron-LM counts: the order of their samples depends on it.
    once = training.eval_iters * training.eval_batch_size
    for_valid = None if training.full_validation else (iterations // training.eval_interval + 1) * once
    datasets = _build(config, (samples, for_valid, once))
    if datasets.train is None:
        raise ValueError(
            "there is no training data: give --data-path a --split with a share for training, or --train-data-path"
        )

    if len(datasets.train) < samples:  # the run would go on after the data: a blend without weights has one epoch
        raise ValueError(
            f"the training data has {len(datasets.train)} samples of {config.model.seq_length} tokens and the run "
            f"takes {samples}: several --data-path prefixes without weights are read once; give each a weight, which "
            "repeats the data, or train for less"
        )

    def iterator(dataset: Dataset | None, name: str) -> DataIterator | None:
        if dataset is None or (name != "training" and training.eval_iters == 0):
            return None
        return DataIterator(
            dataset,
            micro_batch_size=training.micro_batch_size,
            dp_rank=runtime.state.dp.rank,
            dp_size=runtime.state.dp.size,
            num_workers=config.data.num_workers,
            name=name,
            pin_memory=runtime.device.type == "cuda",
        )

    sets: dict[str, Dataset | None] = {"": datasets.valid}
    for name, prefix in config.data.named_sets.items():
        sets[name] = _build_set(config, prefix, for_valid)
    if training.full_validation:
        sets = {name: each and WholeBatches(each, training.eval_batch_size) for name, each in sets.items()}
    train_iterator = iterator(datasets.train, "training")
    assert train_iterator is not None
    for line in source_lines(with_tokens(config), samples, config.model.seq_length):
        runtime.say(f"data: {line}")
    data = TrainingData(
        config.model,
        runtime,
        train_iterator,
        {name: each for name, dataset in sets.items() if (each := iterator(dataset, f"validation {name}".strip()))},
        iterator(datasets.test, "test"),
        datasets.train.fingerprint,
    )
    return data, iterations


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
    for field in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        words = list(getattr(config.data, field) or ())
        for place, word in enumerate(words):
            path, share = split_share(word)
            if is_text(path):
                try:
                    words[place] = made.prefix(dashed(field), path)
                except ValueError as error:
                    problems.append(str(error))
                else:
                    words[place] += "" if share is None else f"@{share[0]}:{share[1]}"
                    replaced[field] = tuple(words)
    if problems:
        raise ValueError("\n".join(problems))
    return replace(config.data, **replaced)


def _build(config: RunConfig, sizes: tuple[int | None, int | None, int | None]) -> Datasets:
    """The data of the flags but for validation sets with names."""
    named, fim, data = config.tokenizer, config.fill_in_middle, config.data
    if data.multiple_validation_sets:
        config = replace(config, data=replace(data, valid_data_path=None))
    tokenizer = build_tokenizer(named, config.model.vocab_size) if named.tokenizer_type else None
    datasets = build_datasets(
        replace(with_tokens(config), reset_position_ids=config.restarts_positions),
        seq_length=config.model.seq_length,
        seed=config.training.seed,
        sizes=sizes,
        eod=tokenizer.eod if tokenizer is not None else None,
        vocab_size=config.model.vocab_size,
    )
    if not fim.fim_data:
        return datasets
    assert tokenizer is not None
    seed = config.training.seed
    return Datasets(*(each and FillInMiddle(each, fim, tokenizer, seed) for each in datasets))


def _build_set(config: RunConfig, prefix: str, samples: int | None) -> Dataset | None:
    """One validation set."""
    alone = replace(config.data, data_path=None, train_data_path=None, test_data_path=None)
    data = replace(alone, valid_data_path=(prefix,), multiple_validation_sets=False)
    return _build(replace(config, data=data), (0, samples, 0)).valid


def put_on_device(batches: list[MicroBatch], config: TransformerConfig, runtime: Runtime) -> list[Batch]:
    """A step's micro-batches as the model takes them: with the labels and masks that the loss makes of whole samples,
    this rank's part of each."""
    fields: list[dict[str, Any]] = [dict(batch) for batch in batches]
    prepare = LOSSES[config.loss_func].prepare
    whole = [prepare(config, Batch(**values)).with_future(config.mtp_depths) for values in fields]
    return [batch.local_to(runtime.state.cp).to(runtime.device) for batch in whole]
