"""Dataset interface and the registry of dataset builders. This module imports neither torch nor numpy.

@DATASETS.register("my_data")
def my_data(config: DatasetConfig, format: SampleFormat, seed: int, sizes: Sequence[int | None]) -> Datasets: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from megatron.core.registry import NoFacts, Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from megatron.core.datasets.sample_format import Sample, SampleFormat


class Dataset(Protocol):
    """Interface of a dataset: a sequence of samples, with the token ids and the origin of each sample."""

    @property
    def fingerprint(self) -> str:
        """Hash that identifies the samples of the dataset and their order. Runs with equal fingerprints see the same
        samples."""

    def __len__(self) -> int: ...

    def text(self, index: int) -> NDArray[np.int64]:
        """Return the seq_length + 1 token ids of a sample."""

    def origin(self, index: int) -> str:
        """Return where a sample starts, in the form `dataset:document+token`."""

    def __getitem__(self, index: int) -> Sample:
        """Return the model inputs of a sample (see `SampleFormat.sample`)."""


class StepShape(NamedTuple):
    """Number of samples in a step and their division among the ranks."""

    samples: int
    replicas: int
    micro_batch_size: int
    context_ranks: int = 1
    """Number of context-parallel ranks, which divide the tokens of each sample among themselves."""


class Dealer(Protocol):
    """Function that assigns the samples of a step to the micro-batches of all replicas. The function must be pure and
    must return the same result on every rank."""

    def __call__(self, dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
        """Return an array [micro-batches, replicas, micro_batch_size] that contains each sample number in `samples`
        once."""


class Datasets(NamedTuple):
    """One dataset per split. A dataset is None if its split has no data, or if the run needs no samples from the
    split."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


class BuildDatasets(Protocol):
    """Interface of functions that build the datasets of a run."""

    def __call__(self, config: object, format: SampleFormat, seed: int, sizes: Sequence[int | None]) -> Datasets:
        """Build the datasets. To build datasets from a stream, use
        `megatron.extensions.data.datasets.generator_dataset.stream_splits`.

        Args:
            config: the run's `DatasetConfig`.
            format: sample length in tokens, and the options for making model inputs.
            seed: random seed for the order of samples.
            sizes: number of samples requested from each split (train, valid, test); None means one epoch.
        """


DATASETS = Registry("--dataset-type", NoFacts, protocol=BuildDatasets)
"""Registry that maps each choice of --dataset-type to a function with the interface of `BuildDatasets`."""

DATASETS.register("gpt", "megatron.core.datasets.build:build_gpt")
DATASETS.register("mock", "megatron.core.datasets.build:build_mock")
