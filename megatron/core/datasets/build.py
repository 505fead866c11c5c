"""Builds the training, validation and test datasets of a run from its flags."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import ceil
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.data import DatasetConfig, weight_of
from megatron.core.datasets.blended import BlendedDataset, normalise
from megatron.core.datasets.dataset import DATASETS, Dataset, Datasets, StepShape
from megatron.core.datasets.gpt_dataset import DividesDocuments, GPTDataset, Pieces, SampleMaker, TextDataset
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, strip_suffix
from megatron.core.datasets.indices import parse_split, split_documents
from megatron.core.datasets.mock import SPLITS, MockGPTDataset
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.datasets.source_order import SourceOrder, split_tokens
from megatron.core.dist_checkpointing.file_storage import located, storage_of

# Fraction of extra samples that each dataset of a weighted blend provides, because greedy drawing may temporarily draw
# more from a dataset than its share.
SURPLUS = 0.005
SIZE_FLAGS = {"train": "--train-iters or --train-samples", "valid": "--eval-iters", "test": "--eval-iters"}


T = TypeVar("T")


@dataclass
class TrainingOrder:
    """State of the training sources of a run: the number of samples of each source that all phases so far have
    consumed."""

    planned: tuple[int | None, ...] = ()
    """Earlier sample counts of the current phase: for each extension of the phase, the number of samples that was
    planned before the extension, oldest first. None means one epoch. If the phase was never extended, `planned` is
    empty."""

    take_up: Callable[[SourceOrder, str, SampleFormat], None] = lambda *told: None
    """Function that is called for each source of the current phase before the source is used. The arguments of
    `take_up` are the source, the prefix of the source's dataset, and the sample format."""

    sources: dict[Hashable, SourceOrder] = field(default_factory=dict)
    present: list[SourceOrder] = field(default_factory=list)
    """Sources of the current phase, in blend order."""

    def take(self, dataset: Dataset, samples: int) -> None:
        """Record that the run consumed `samples` samples of `dataset`, the dataset of the current phase."""
        if isinstance(dataset, BlendedDataset):
            counts = np.bincount(dataset.index.dataset[:samples], minlength=len(self.present)).tolist()
        else:
            counts = [samples] * len(self.present)
        for source, count in zip(self.present, counts, strict=True):
            source.take(count)


@dataclass(frozen=True)
class Demands:
    """Requirements that a run imposes on its datasets, in addition to the `DatasetConfig`."""

    order: TrainingOrder = field(default_factory=TrainingOrder)
    needed: tuple[bool, ...] | None = None
    """One bool per split: True if the run draws samples from the split. None means that the run draws samples from
    every split whose size is given."""

    longest: int = 0
    """Largest sequence length of the run if the sequence length changes during the run, and 0 otherwise."""

    say: Callable[[str], None] = lambda line: None
    """Function that is called with a message for each dataset whose splits are not divided at document boundaries."""


class Blend(NamedTuple):
    """Dataset prefixes of a blend, and their weights. `weights` is None if the flag contains only prefixes."""

    prefixes: list[str]
    weights: list[float] | None


def parse_blend(flag: str, values: Sequence[str]) -> Blend:
    """Parse the values of a flag, which have the form `PREFIX...` or `WEIGHT PREFIX ...`. The function raises
    ValueError, with `flag` in the message, if the values are invalid."""
    shown = f"{flag} {' '.join(values)}"
    if not values:
        raise ValueError(f"{flag}: must be a dataset prefix, or pairs of weight and prefix")
    weights = [weight_of(value) for value in values[::2]]
    if len(values) == 1 or all(weight_of(value) is None for value in values):
        return Blend([strip_suffix(value) for value in values], None)
    if len(values) % 2:
        raise ValueError(
            f"{shown}: {len(values)} values are not pairs of weight and prefix; "
            "put a weight before every prefix, or before none"
        )
    for place, (value, weight) in enumerate(zip(values[::2], weights, strict=True)):
        if weight is None:
            prefix = values[2 * place + 1]
            raise ValueError(f"{shown}: value {2 * place + 1}, {value!r}, must be the weight of {prefix!r}")
        if not 0 < weight < float("inf"):
            raise ValueError(f"{shown}: weight {value} must be positive; remove the dataset if it is not needed")
    return Blend([strip_suffix(value) for value in values[1::2]], [weight for weight in weights if weight is not None])


def split_share(prefix: str) -> tuple[str, tuple[float, float] | None]:
    """Split `PREFIX@0:0.9` into PREFIX and its document share (0, 0.9); the share is None without `@`.

    The function raises ValueError if the share is not within [0, 1].
    """
    found = re.fullmatch(r"(.+)@([0-9.]+):([0-9.]+)", prefix)
    if found is None:
        return prefix, None
    start, end = float(found[2]), float(found[3])
    if not 0 <= start < end <= 1:
        raise ValueError(f"{prefix}: the share of documents must be START:END with 0 <= START < END <= 1")
    return found[1], (start, end)


def build_datasets(
    config: DatasetConfig,
    *,
    seq_length: int,
    seed: int,
    sizes: tuple[int | None, int | None, int | None],
    eod: int | None = None,
    vocab_size: int | None = None,
    demands: Demands | None = None,
) -> Datasets:
    """Build the datasets of a run.

    All processes may call this function at the same time, even if there is no process group.

    Args:
        config: Paths and options of the data.
        seq_length: Tokens per sample.
        seed: Seed of the sample order.
        sizes: Number of samples in each split: train, valid, test. None means one epoch.
        eod: Id of the end-of-document token; None if the tokenizer has no such token.
        vocab_size: Exclusive upper bound of the token ids, for the data check.
        demands: Requirements of the run in addition to `config`. Only indexed datasets use these requirements.

    Raises:
        ValueError: A flag or a file is invalid, a split contains no documents, or a token id is outside the vocabulary.
    """
    format = SampleFormat(
        seq_length, eod, vocab_size, config.eod_mask_loss, config.reset_position_ids, config.reset_attention_mask
    )
    if config.dataset == "gpt":
        return build_gpt(config, format, seed, sizes, demands)
    return DATASETS[config.dataset](config, format, seed, sizes)


def build_gpt(
    config: DatasetConfig,
    format: SampleFormat,
    seed: int,
    sizes: Sequence[int | None],
    demands: Demands | None = None,
) -> Datasets:
    """Build the splits of indexed datasets in Megatron's file format."""
    demands = demands or Demands()
    needed = demands.needed or tuple(size != 0 for size in sizes)
    builder = _Builder(config, format, seed, replace(demands, needed=needed))
    if config.per_split:
        paths = (config.train_data_path, config.valid_data_path, config.test_data_path)
        calls = [
            partial(builder.own_split, split, values, size)
            for split, values, size in zip(SPLITS, paths, sizes, strict=True)
        ]
    else:
        assert config.data_path
        blend = parse_blend("--data-path", config.data_path)
        shares = parse_split(config.split)
        calls = [
            partial(builder.split, split, blend, shares, number, size)
            for number, (split, size) in enumerate(zip(SPLITS, sizes, strict=True))
        ]
    return Datasets(*_all(calls))


def _all(calls: Iterable[Callable[[], T]]) -> list[T]:
    """Call each function and return all results. If some calls raise ValueError, raise one ValueError that contains all
    messages."""
    results, errors = [], []
    for call in calls:
        try:
            results.append(call())
        except ValueError as error:
            errors += str(error).split("\n")
    if errors:
        raise ValueError("\n".join(dict.fromkeys(errors)))
    return results


def build_mock(config: DatasetConfig, format: SampleFormat, seed: int, sizes: Sequence[int | None]) -> Datasets:
    """Build the splits from synthetic data."""
    found: list[Dataset | None] = []
    for split, size in zip(SPLITS, sizes, strict=True):
        assert size is not None, "the length of synthetic data must be set, because the data has no epochs"
        found.append(MockGPTDataset(size, format, seed=seed, split=split) if size else None)
    return Datasets(*found)


class _Builder:
    """Builds the training, validation and test splits of a run. All splits share one open file per indexed dataset."""

    def __init__(self, config: DatasetConfig, format: SampleFormat, seed: int, demands: Demands) -> None:
        self.config = config
        self.format = format
        self.seed = seed
        self.demands = demands
        self.open, self.say = cache(IndexedDataset), cache(demands.say)
        makers = [options.sample_maker() for options in dividers(config)]
        self.make: SampleMaker = next((make for make in makers if make is not None), GPTDataset)

    def own_split(self, split: str, values: Sequence[str] | None, size: int | None) -> Dataset | None:
        """Build a split from the flag for this split, such as --valid-data-path. A single prefix is not blended, even
        if it has a weight."""
        if not values:
            return None
        blend = parse_blend(f"--{split}-data-path", values)
        if len(blend.prefixes) == 1:
            blend = Blend(blend.prefixes, None)
        return self.split(split, blend, (1.0,), 0, size)

    def split(self, split: str, blend: Blend, shares: Sequence[float], number: int, size: int | None) -> Dataset | None:
        """Build one split (train, valid or test) of a blend of datasets.

        Args:
            split: Name of the split.
            blend: Prefixes and their weights.
            shares: Shares that divide the documents of each dataset into splits.
            number: Position of the split in `shares`.
            size: Number of samples, or None for one epoch.
        """
        if not shares[number]:
            return None
        if size is not None and size < 0:
            raise ValueError(f"the {split} split needs {size} samples; correct {SIZE_FLAGS[split]}")
        prefixes, weights = blend
        asked = (*self.demands.order.planned, size) if split == "train" else (size,)
        if len(prefixes) == 1 and weights is None:
            return self._one(split, prefixes[0], shares, number, asked)
        if weights is not None and size is None:
            raise ValueError(
                f"the {split} split blends {len(prefixes)} datasets by weight, so it has no epochs; set the length "
                f"with {SIZE_FLAGS[split]}, or remove the weights to use every sample once"
            )
        if size == 0:
            return None
        wanted: list[tuple[int | None, ...]] = [(None,)] * len(prefixes)
        if weights is not None:
            weights = normalise(weights)
            wanted = [tuple(ceil(ceil((n or 0) * weight) * (1 + SURPLUS)) for n in asked) for weight in weights]
        datasets = _all(
            partial(self._one, split, prefix, shares, number, planned)
            for prefix, planned in zip(prefixes, wanted, strict=True)
        )
        parts = [dataset for dataset in datasets if dataset is not None]
        lengths, total = [len(part) for part in parts], size
        if weights is not None:
            total = sum(ceil((size or 0) * weight) for weight in weights)
        elif size is not None:
            total = min(size, sum(lengths))
        return BlendedDataset(parts, weights or lengths, total, self._cache(prefixes[0]))

    def _one(
        self, split: str, prefix: str, shares: Sequence[float], number: int, planned: Sequence[int | None]
    ) -> TextDataset | None:
        prefix, share = split_share(prefix)
        indexed = self.open(prefix)
        assert indexed.checked, "indexed.checked raises ValueError if the index is invalid"
        documents: range | Pieces
        if share is None:
            documents = self._documents(prefix, indexed, shares)[number]
        elif len(shares) == 1:
            documents = range(*(round(end * len(indexed)) for end in share))
        else:
            rule = "documents selected by a share cannot be divided by --split"
            raise ValueError(
                f"--data-path {prefix}@{share[0]:g}:{share[1]:g}: {rule}; use --train-data-path, --valid-data-path or "
                "--test-data-path"
            )
        if not documents:
            if planned[-1] == 0:
                return None
            if not len(indexed):
                raise ValueError(f"dataset {prefix} has no documents; create it again from files with text")
            raise ValueError(f"--{split}-data-path: dataset {prefix} has no documents")
        files = self._cache(prefix)
        if split != "train":
            return self.make(indexed, documents, planned[-1], self.format, seed=self.seed, split=split, cache=files)
        order = self.demands.order
        key = (prefix, share, sum(each.indexed.prefix == indexed.prefix for each in order.present))
        source = order.sources.get(key)
        if source is None:
            source = SourceOrder(indexed, documents, seed=self.seed, split=split, cache=files, make=self.make)
        order.take_up(source, prefix, self.format)
        found = source.view(self.format, planned)
        order.sources[key] = source
        order.present.append(source)
        return found

    def _documents(self, prefix: str, indexed: IndexedDataset, shares: Sequence[float]) -> Sequence[range | Pieces]:
        """Return the documents of each split.

        If a split that the run needs would otherwise receive no document, the tokens of all documents are concatenated
        and divided instead.
        """
        found, needed = split_documents(shares, len(indexed)), self.demands.needed
        assert needed is not None
        wanted = [bool(share and need) for share, need in zip(shares, needed, strict=False)]
        if len(shares) == 1 or not len(indexed) or all(found[n] for n, want in enumerate(wanted) if want):
            return found
        length = max(self.demands.longest, self.format.seq_length)
        parts = split_tokens(indexed.lengths, shares, wanted, length + 1)
        if parts is None:
            names = " and ".join(name for name, want in zip(SPLITS, wanted, strict=True) if want)
            raise ValueError(
                f"--split {self.config.split}: the {len(indexed)} documents of {prefix} are too few to divide, and "
                f"their {indexed.num_tokens} tokens too few for a sample of --seq-length {length} + 1 in each of "
                f"{names}; shorten the sequence, add data, set a share to 0, or turn evaluation off with --eval-iters 0"
            )
        sizes = ", ".join(f"{name} {part.tokens:,}" for name, part in zip(SPLITS, parts, strict=True) if part)
        self.say(
            f"{prefix}: {len(indexed)} documents are too few for --split {self.config.split}; dividing the tokens of "
            f"all documents instead: {sizes}"
        )
        return parts

    def _cache(self, prefix: str) -> IndexCache:
        beside = storage_of(path := located(prefix)).cache_folder(path) / "GPTDataset_indices"
        return IndexCache(self.config.data_cache_path, str(beside))


def dividers(config: DatasetConfig) -> list[DividesDocuments]:
    """Return the extension options that may replace the division of documents into samples."""
    return [options for options in config.extension_options if isinstance(options, DividesDocuments)]


def training_sources(config: DatasetConfig) -> list[tuple[str, float, float | None]]:
    """For each dataset of the training split, return its prefix, the share of its documents used for training, and its
    share of the samples.

    If several datasets have no weights, their sample shares are None, because every dataset is then used completely.
    """
    flag = "--data-path"
    values = config.data_path
    share = 1.0
    if config.dataset != "gpt":
        return []
    if config.per_split:
        flag, values = "--train-data-path", config.train_data_path
    elif values:
        share = parse_split(config.split)[0]
    if not values:
        return []
    blend = parse_blend(flag, values)
    weights: list[float | None] = list(normalise(blend.weights)) if blend.weights else [None] * len(blend.prefixes)
    found = []
    for prefix, weight in zip(blend.prefixes, weights, strict=True):
        path, part = split_share(prefix)
        of_documents = share if part is None else part[1] - part[0]
        found.append((path, of_documents, 1.0 if len(blend.prefixes) == 1 else weight))
    return found


def source_lines(
    config: DatasetConfig,
    samples: int | None,
    seq_length: int,
    step: StepShape | None = None,
    other: Callable[[str], str | None] = lambda path: None,
) -> Iterator[str]:
    """Yield one line of text for each dataset of the training split. If a dataset cannot be read, its line contains the
    error.

    Args:
        config: Paths and options of the data.
        samples: Number of samples in the run; None means one epoch.
        seq_length: Tokens per sample.
        step: Shape of the run's steps, if it is known.
        other: Function that returns the line for a path that is not an indexed dataset, or None for any other path.
    """

    def with_samples(line: str, lengths: NDArray | None) -> str:
        told = [options.line(lengths, seq_length, step) for options in dividers(config)]
        return "; ".join([line, *(text for text in told if text)])

    for prefix, of_documents, of_samples in training_sources(config):
        if line := other(prefix):
            yield with_samples(line, None)
            continue
        try:
            dataset = IndexedDataset(prefix)
        except (OSError, ValueError) as error:
            yield str(error)
            continue
        line = f"{prefix}: {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens"
        if samples is not None and of_samples is not None and dataset.num_tokens:
            epochs = samples * of_samples * seq_length / (dataset.num_tokens * of_documents)
            part = "" if of_documents == 1 else f" of the {100 * of_documents:.4g} % for training"
            line += f"; {epochs:.3g} epochs{part}"
        yield with_samples(line, dataset.lengths)
