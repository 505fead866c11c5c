"""What a run takes of each of its data sets: documents, tokens, and how often the run goes through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron.core.config.data import DatasetConfig
from megatron.core.datasets.blended import normalise
from megatron.core.datasets.build import parse_blend, split_share
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.indices import parse_split


def training_sources(config: DatasetConfig) -> list[tuple[str, float, float | None]]:
    """(prefix, share of its documents that is for training, share of the samples) of each data set of the training
    split; the last is None where several have no weights, as all of each is used."""
    flag, values, share = "--data-path", config.data_path, 1.0
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
    config: DatasetConfig, samples: int | None, seq_length: int, other: Callable[[str], str | None] = lambda path: None
) -> Iterator[str]:
    """A line for each data set of the training split, of a run of `samples` samples; None: one epoch. What cannot be
    opened is said. `other` may return the line of a path that is no indexed dataset."""
    for prefix, of_documents, of_samples in training_sources(config):
        if line := other(prefix):
            yield line
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
        yield line
