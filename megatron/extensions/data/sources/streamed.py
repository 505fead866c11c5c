"""Data sets whose documents are read by a third-party library and tokenized during training. Checkpoints store the
position in the stream of documents."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from megatron.core.config.data import DatasetConfig, Tokenizer
from megatron.core.datasets.build import SIZE_FLAGS
from megatron.core.datasets.dataset import Datasets
from megatron.core.datasets.mock import SPLITS
from megatron.core.datasets.sample_format import SampleFormat
from megatron.core.dist_checkpointing.path_kind import data_kind_of
from megatron.core.tokenizers import added_after, build_tokenizer
from megatron.extensions.data.datasets.generator_dataset import GeneratorDataset
from megatron.extensions.data.sources.documents import Documents, Value, size_of
from megatron.extensions.data.sources.flags import StreamConfig
from megatron.extensions.data.sources.path_kinds import SourceKind
from megatron.extensions.data.sources.sample_stream import Place, SampleStream
from megatron.extensions.data.text_data.flags import TextDataConfig
from megatron.training.hooks import Callback, Meter
from megatron.training.run import TrainingRun


class StreamedDataset(GeneratorDataset):
    """Data set with `samples` samples that are built from documents during training."""

    def __init__(
        self, documents: Documents, samples: int, format: SampleFormat, seed: str, config: DatasetConfig
    ) -> None:
        window = config.options(StreamConfig).stream_shuffle_window
        self.append_eod = config.options(TextDataConfig).append_eod
        self.documents = documents
        self.tokenizer: Tokenizer | None = None
        self.samples_of = SampleStream(documents, self._encoded, format.seq_length, seed, window)
        sizes = [[os.path.basename(path), size_of(path)] for path in documents.files]
        super().__init__(self.samples_of, samples, format, f"{seed} {window} {documents.name} {documents.key} {sizes}")

    def _encoded(self, value: Value) -> NDArray[np.int64]:
        if isinstance(value, ValueError):
            raise ValueError(f"{self.documents.name}: {value}")
        if isinstance(value, np.ndarray):
            return value.astype(np.int64)
        assert self.tokenizer is not None, "the callback sets the tokenizer before the first step"
        text = value.decode() if isinstance(value, bytes) else value
        ids = self.tokenizer.tokenize(text) if text else []
        eod = self.tokenizer.eod
        ends = self.append_eod and eod is not None and added_after(self.tokenizer)[-1:] != [eod]
        return np.array([*ids, eod] if ids and ends else ids, np.int64)


def build_stream(config: object, format: SampleFormat, seed: int, sizes: Sequence[int | None]) -> Datasets:
    """Return the data sets of a run, one per split. Each data set reads its own stream. `sizes` contains the number of
    samples in each split."""
    assert isinstance(config, DatasetConfig)
    paths = (config.train_data_path or config.data_path, config.valid_data_path, config.test_data_path)
    found: list[StreamedDataset | None] = []
    for split, size, words in zip(SPLITS, sizes, paths, strict=True):
        flag = "--data-path" if words is config.data_path else f"--{split}-data-path"
        if not words and split == "train":
            raise ValueError("--dataset-type stream: has no data; add --data-path or --train-data-path")
        if not words or size == 0:
            found.append(None)
            continue
        if size is None:
            raise ValueError(f"{flag} {words[-1]}: a stream has no epoch; give its length with {SIZE_FLAGS[split]}")
        if len(words) > 1:
            raise ValueError(f"{flag} {' '.join(words)}: a stream is one data set; omit --dataset-type for a blend")
        kind = data_kind_of(words[0])
        if not isinstance(kind, SourceKind):
            rule = "is not a data set of datasets, webdataset or mosaicml-streaming"
            raise ValueError(f"{flag} {words[0]}: {rule}; omit --dataset-type for other files")
        documents = kind.opened(flag, words[0], config.options(TextDataConfig).key_of(words[0]))
        found.append(StreamedDataset(documents, size, format, f"{seed} {split}", config))
    return Datasets(*found)


def stream_in(dataset: object) -> StreamedDataset:
    """Remove the wrappers around a data set of the run, and return the `StreamedDataset` inside."""
    while not isinstance(dataset, StreamedDataset):
        dataset = vars(dataset)["inner"]
    return dataset


def with_tokenizer(dataset: StreamedDataset, tokenizer: Tokenizer | None) -> None:
    """Set the tokenizer of a stream. Raises ValueError if the stream contains text and `tokenizer` is None."""
    if tokenizer is None and not isinstance(dataset.documents.first(), np.ndarray):
        raise ValueError(f"{dataset.documents.name}: text needs a tokenizer; add --tokenizer-type and its files")
    dataset.tokenizer = tokenizer


class PlaceInStream(Callback):
    """Callback that stores the position of the next training sample in checkpoints, so that a resumed run does not have
    to read earlier data.

    All ranks compute the same position, so any rank can write it to the checkpoint.
    """

    known: Mapping[str, object] = MappingProxyType({})
    """State that was loaded from the checkpoint from which the run resumes."""

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        self._run = run
        named = run.config.tokenizer
        tokenizer = build_tokenizer(named, run.config.model.vocab_size) if named.tokenizer_type else None
        for splits in run.data.splits:
            for each in (splits.train, *splits.valid.values(), splits.test):
                if each is not None:
                    with_tokenizer(stream_in(each), tokenizer)
        dataset = stream_in(run.data.train.dataset)
        self.stream, self.fingerprint = dataset.samples_of, dataset.fingerprint
        if self.known.get("stream") == self.fingerprint:
            sample, place = self.known["sample"], self.known["place"]
            assert isinstance(sample, int) and isinstance(place, list)
            self.stream.know(sample, Place(*place))
        return ()

    def state(self) -> object:
        sample = self._run.progress.consumed_samples
        return {"stream": self.fingerprint, "sample": sample, "place": list(self.stream.place(sample))}

    def load_state(self, state: object) -> None:
        assert isinstance(state, dict)
        self.known = state
