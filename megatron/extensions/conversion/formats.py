"""Formats that checkpoints can be converted between: what a source provides, and what a target does with it.

A format is one `Source`, one `Target`, or both. They meet in our names of parameters (`ParamMeta.name`): a source reads
a whole parameter of that name, a target asks for one after the other and drops it once it is written.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress


@dataclass(frozen=True)
class Options:
    """What a user chooses about the output."""

    dtype: torch.dtype | None = None
    """Number format of all weights; None: as stored."""

    max_shard_bytes: int = 5_000_000_000
    """Hugging Face: largest file of weights."""

    model_type: str | None = None
    """Hugging Face: family to write; None: that of the source, or the first that can express the model."""

    weights_only: bool = False
    """Leave out the optimizer's state and the run's progress."""

    make_vocab_size_divisible_by: int = 128
    """Hugging Face as a source: the vocabulary is padded to a multiple of this."""


@dataclass(frozen=True)
class TrainingState:
    """What a source has of the run beside the model's weights, so that a run can resume where another left off."""

    progress: Progress
    step_count: int
    """Updates made, in Adam's bias correction."""

    kinds: tuple[str, ...]
    """Kinds of the optimizer's state: "main_param", "exp_avg" and so on."""

    read: Callable[[str, str], Tensor]
    """(kind, name of a parameter) -> the whole state."""

    dtype: Callable[[str, str], torch.dtype]
    """The dtype in which `read` returns it."""

    loss_scaler: Mapping[str, float] = field(default_factory=dict)
    """State of fp16's loss scale: "scale", and of a dynamic one "good_steps" and "allowance"."""


class Source(ABC):
    """A model on disk. Its constructor raises ValueError, in one line, for whatever cannot be read or expressed."""

    config: RunConfig
    """Model, tokenizer and number format; other sections have no meaning."""

    metas: Mapping[str, ParamMeta]
    """All parameters by name."""

    states: Collection[str] = ()
    """Names of what the model keeps beside parameters and the source has; a target makes what is missing."""

    model_type: str | None = None
    """The Hugging Face family, if it is known."""

    side_files: Mapping[str, Path] = {}
    """Name in a Hugging Face folder -> file of the tokenizer or of settings of generation, to be copied along."""

    notes: tuple[str, ...] = ()
    """Lines for the user."""

    def training(self) -> TrainingState | None:
        """The state of training, if the source has one. Raises ValueError if it has one that cannot be read."""
        return None

    @abstractmethod
    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        """The dtype in which `read` returns a parameter: `wanted`, or as stored."""

    @abstractmethod
    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        """A whole parameter or state. Raises ValueError or OSError."""

    @abstractmethod
    def check_data(self) -> None:
        """Raises ValueError for what can be seen only by reading weights."""


Written = Callable[[int], None]
"""Called with the number of bytes of each tensor that has been written."""


class Target(ABC):
    """What to write. Its constructor plans all of it, and raises ValueError if the format cannot express the model."""

    nbytes: int
    """Bytes of all tensors."""

    notes: tuple[str, ...] = ()
    """Lines for the user."""

    @abstractmethod
    def write(self, folder: Path, world: Axis, written: Written) -> None:
        """Writes the weights. Collective over `world`, whose processes share the work."""

    @abstractmethod
    def finish(self, folder: Path) -> None:
        """Writes all other files. Called once, after the weights."""


@dataclass(frozen=True)
class Format:
    """A format by name."""

    name: str
    open: Callable[[Path, Options], Source]
    plan: Callable[[Source, Path, Options], Target] | None
    """Plans what to write, given the source and the folder where the output will lie; None: it can only be read."""
