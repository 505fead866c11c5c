"""Data sets as a run sees them, and the registry of what builds them. No torch, and no numpy.

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
    """Interface of a dataset: numbered samples, their tokens and their origin."""

    @property
    def fingerprint(self) -> str:
        """Hash of the data and their order. Runs with equal fingerprints see the same samples."""

    def __len__(self) -> int: ...

    def text(self, index: int) -> NDArray[np.int64]:
        """The seq_length + 1 token ids of a sample."""

    def origin(self, index: int) -> str:
        """Start of a sample: `dataset:document+token`."""

    def __getitem__(self, index: int) -> Sample:
        """The model inputs of a sample, see `SampleFormat.sample`."""


class StepShape(NamedTuple):
    """How many samples a step takes, and what they are dealt to."""

    samples: int
    replicas: int
    micro_batch_size: int
    context_ranks: int = 1
    """Ranks that divide the queries of each sample."""


class Dealer(Protocol):
    """Deals the samples of a step to the micro-batches of all replicas: a pure function, the same on every rank."""

    def __call__(self, dataset: Dataset, samples: range, replicas: int, micro_batch_size: int) -> NDArray[np.int64]:
        """[micro-batches, replicas, micro_batch_size]: the numbers of `samples`, each once."""


class Datasets(NamedTuple):
    """One dataset per split; None if the split has no share or no samples are needed."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


class BuildDatasets(Protocol):
    """Builds the data of a run."""

    def __call__(self, config: object, format: SampleFormat, seed: int, sizes: Sequence[int | None]) -> Datasets:
        """`config` is the run's `DatasetConfig`, and `sizes` are the samples wanted of each split (None: one epoch).
        `megatron.extensions.data.datasets.generator_dataset.stream_splits` builds them of a stream."""


DATASETS = Registry("--dataset-type", NoFacts, protocol=BuildDatasets)
"""Name -> `BuildDatasets`."""

DATASETS.register("gpt", "megatron.core.datasets.build:build_gpt")
DATASETS.register("mock", "megatron.core.datasets.build:build_mock")
