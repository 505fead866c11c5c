"""Formats that checkpoints can be converted between: what a source provides, and what a target does with it.

A format is one `Source`, one `Target`, or both. They meet in our names of parameters (`ParamMeta.name`): a source reads
a whole parameter of that name, a target asks for one after another and drops it once it is written. Beside them are the
files of a tokenizer in the folder of a model, as Hugging Face names them. This module does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from megatron.core.config.data import TokenizerConfig
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.param_meta import ParamMeta
from megatron.core.tokenizers import with_local_files
from megatron.extensions.data.tokenizers.huggingface import tokenizer_file
from megatron.training.config.run_config import RunConfig
from megatron.training.progress import Progress

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron.core.parallel_state import Axis


@dataclass(frozen=True)
class Options:
    """Choices of a user for the output."""

    dtype: torch.dtype | None = None
    """Number format of all weights; None: as stored."""

    max_shard_bytes: int = 5_000_000_000
    """Hugging Face: largest file of weights."""

    family: str | None = None
    """Hugging Face: family to write; None: that of the source, or the first that can express the model."""

    weights_only: bool = False
    """Leave out the optimizer's state and the run's progress."""

    weights: str | None = None
    """Ours as a source: a state of a callback to take in place of the weights that were trained, such as an average:
    `CALLBACK.STATE`, or `CALLBACK` if it has one."""

    make_vocab_size_divisible_by: int = 128
    """Hugging Face as a source: the vocabulary is padded to a multiple of this."""


@dataclass(frozen=True)
class TrainingState:
    """State of the run in a source, beside the model's weights, so that a run can resume where another left off."""

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


@dataclass(frozen=True)
class Origin:
    """The Hugging Face model that weights came from, as checkpoints remember it (`Progress.origin`)."""

    model_type: str | None = None
    """Its family; None if it is unknown."""

    token_ids: Mapping[str, object] = field(default_factory=dict)
    """Token ids under their names in config.json, for a model without tokenizer files."""

    @classmethod
    def of(cls, stored: Mapping[str, object]) -> Origin:
        """The origin in a checkpoint, which may come from anyone. Entries of wrong types are left out."""
        model_type, ids = stored.get("model_type"), stored.get("token_ids")
        known = ids.items() if isinstance(ids, dict) else ()
        return cls(
            model_type if isinstance(model_type, str) else None,
            {name: value for name, value in known if value is None or _are_ids(value)},
        )


def _are_ids(value: object) -> bool:
    """Return whether a value is a token id, or a list of them as several tokens may end a text."""
    return all(type(each) is int and each >= 0 for each in (value if isinstance(value, list) else [value]))


class Source(ABC):
    """A model on disk. Its constructor raises ValueError, in one line, for whatever cannot be read or expressed."""

    config: RunConfig
    """Model, tokenizer and number format; other sections have no meaning."""

    metas: Mapping[str, ParamMeta]
    """All parameters by name."""

    states: Collection[str] = ()
    """Names of what the model keeps beside parameters and the source has; a target makes what is missing."""

    origin: Origin = Origin()
    """The Hugging Face model that the weights came from; of unknown family if there is none."""

    side_files: Mapping[str, Path] = {}
    """Name in a Hugging Face folder -> file of the tokenizer or of settings of generation, to be copied along."""

    notes: tuple[str, ...] = ()
    """Lines for the user."""

    progress: Progress | None = None
    """Position of the run that saved the weights; None if the source does not record one."""

    merged: Mapping[str, object] | None = None
    """Description of the merged checkpoints in JSON types, for the metadata of the output."""

    def training(self) -> TrainingState | None:
        """The state of training, if the source has one. Raises ValueError if it has one that cannot be read."""
        return None

    @abstractmethod
    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        """The dtype in which `read` returns a parameter: `wanted`, or as stored."""

    @abstractmethod
    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        """A whole parameter or state. Raises ValueError or OSError."""

    def read_state(self, meta: ParamMeta, dtype: torch.dtype) -> Tensor:
        """Buffers of the model beside parameters; zeros, as it starts, where the source has none."""
        if meta.name in self.states:
            return self.read(meta.name, dtype)
        from torch import zeros

        return zeros(meta.global_shape, dtype=dtype)

    @abstractmethod
    def check_data(self) -> None:
        """Raises ValueError for what can be seen only by reading weights."""


def few(problems: Sequence[str], limit: int) -> str:
    """The first problems in one line, with the number of the others."""
    return "; ".join(problems[:limit]) + (f"; and {len(problems) - limit} more" if len(problems) > limit else "")


Written = Callable[[int], None]
"""Called with the number of bytes of each tensor that has been written."""


class Target(ABC):
    """Output of a conversion. The constructor plans all of it, and raises ValueError if the format cannot express
    the model."""

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


@runtime_checkable
class Format(Protocol):
    """A format that models are converted from and to. A kind of path, registered in `PATH_KINDS`, may be one."""

    @property
    def format(self) -> str:
        """Its name, for --to."""

    @property
    def usual(self) -> bool:
        """True if checkpoints of this program are converted to it where --to says nothing."""

    def open(self, path: PurePath, options: Options) -> Source:
        """Opens a path: in any storage for checkpoints of ours, on the local disk for other formats."""

    def plan(self, source: Source, folder: Path, options: Options) -> Target:
        """Plans what to write into the folder where the output will lie."""


MERGE_FILE = "merge.json"
"""File of an output of any format that has `Source.merged`."""

GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """The files of a folder that belong to its tokenizer."""
    return (folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def tokenizer_config(folder: PurePath, names: Collection[str] | None = None) -> TokenizerConfig:
    """Flags for the tokenizer of a Hugging Face folder that has, or will have, files of these names.

    They name no tokenizer if the files are those of none.
    """
    names = storage_of(folder).names(folder) if names is None else names
    if "tokenizer.json" in names:
        return TokenizerConfig("HuggingFaceTokenizer", str(folder))
    if "tokenizer.model" in names:
        return TokenizerConfig("Llama2Tokenizer", str(folder / "tokenizer.model"))
    if {"vocab.json", "merges.txt"} <= set(names):
        return TokenizerConfig(
            "GPT2BPETokenizer", vocab_file=str(folder / "vocab.json"), merge_file=str(folder / "merges.txt")
        )
    return TokenizerConfig()


def side_files_of(tokenizer: TokenizerConfig) -> dict[str, Path]:
    """The files of a run's tokenizer, by their names in a Hugging Face folder, that are where the run had them."""
    found: dict[str, Path] = {}
    tokenizer = with_local_files(tokenizer)
    if tokenizer.tokenizer_type == "HuggingFaceTokenizer":
        try:
            file = tokenizer_file(str(tokenizer.tokenizer_model))
        except ValueError:
            return {}
        found = {each.name: each for each in tokenizer_files(file.parent)}
        found |= {"tokenizer.json": file, GENERATION_CONFIG: file.parent / GENERATION_CONFIG}
    elif tokenizer.tokenizer_type in ("SentencePieceTokenizer", "Llama2Tokenizer"):
        found = {"tokenizer.model": Path(str(tokenizer.tokenizer_model))}
    elif tokenizer.tokenizer_type == "GPT2BPETokenizer":
        found = {"vocab.json": Path(str(tokenizer.vocab_file)), "merges.txt": Path(str(tokenizer.merge_file))}
    return {name: path for name, path in found.items() if path.is_file()}
