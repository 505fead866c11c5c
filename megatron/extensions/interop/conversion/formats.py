"""Interfaces of checkpoint formats: sources, which provide a model, and targets, which write a model.

A format provides a `Source`, a `Target`, or both. Sources and targets identify parameters by this program's parameter
names (`ParamMeta.name`). A source returns complete, unsharded parameters. A target requests the parameters one by one,
and frees each parameter after writing it. A source also provides the paths of the model's tokenizer files, keyed by
their names in a Hugging Face folder. This module does not import torch.
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
    """Options that the user can set for the output of a conversion."""

    dtype: torch.dtype | None = None
    """Dtype of all weights in the output. None keeps the stored dtypes."""

    max_shard_bytes: int = 5_000_000_000
    """Maximum size of a weights file in bytes. Only Hugging Face targets use this option."""

    family: str | None = None
    """Name of the family to write. None selects the source's family or, if this family cannot express the model, the
    first family that can express the model. Only Hugging Face targets use this option."""

    weights_only: bool = False
    """True to omit the optimizer's state and the run's progress."""

    weights: str | None = None
    """Name of a callback state, such as averaged weights, that replaces the trained weights. The name is
    `CALLBACK.STATE`, or `CALLBACK` if the callback has only one state. Only sources in this program's format support
    this option.
    """

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this number. Only Hugging Face sources use this option."""


@dataclass(frozen=True)
class TrainingState:
    """Training state of a source, without the model's weights. A run that loads this state continues the run that saved
    it."""

    progress: Progress
    step_count: int
    """Number of optimizer updates so far. Adam's bias correction depends on this number."""

    kinds: tuple[str, ...]
    """Kinds of optimizer state, such as "main_param" and "exp_avg"."""

    read: Callable[[str, str], Tensor]
    """Function that returns a complete, unsharded optimizer state. The arguments of the function are the kind of state
    and the parameter name."""

    dtype: Callable[[str, str], torch.dtype]
    """Function that returns the dtype of the tensor that `read` returns for the same arguments."""

    loss_scaler: Mapping[str, float] = field(default_factory=dict)
    """State of the fp16 loss scaler. The dict has the key "scale" and, if the loss scale is dynamic, also the keys
    "good_steps" and "allowance"."""


@dataclass(frozen=True)
class Origin:
    """Hugging Face model from which the weights were loaded. Checkpoints record the origin in `Progress.origin`."""

    model_type: str | None = None
    """Family of the model, or None if it is unknown."""

    token_ids: Mapping[str, object] = field(default_factory=dict)
    """Token ids such as `eos_token_id`, keyed by their names in config.json, for a model without tokenizer files."""

    @classmethod
    def of(cls, stored: Mapping[str, object]) -> Origin:
        """Read the origin recorded in a checkpoint. Entries of wrong types are dropped, because the checkpoint may be
        untrusted."""
        model_type, ids = stored.get("model_type"), stored.get("token_ids")
        known = ids.items() if isinstance(ids, dict) else ()
        return cls(
            model_type if isinstance(model_type, str) else None,
            {name: value for name, value in known if value is None or _are_ids(value)},
        )


def _are_ids(value: object) -> bool:
    """Return True if a value is a token id or a list of token ids. Lists are accepted, because a model may have several
    end-of-text tokens."""
    return all(type(each) is int and each >= 0 for each in (value if isinstance(value, list) else [value]))


class Source(ABC):
    """Model on disk. The constructor raises ValueError, with a one-line message, if the model cannot be read, or if
    this program cannot express the model."""

    config: RunConfig
    """Configuration of the model, the tokenizer and the number format. The other sections of the configuration are
    meaningless and must be ignored."""

    metas: Mapping[str, ParamMeta]
    """Metadata of all parameters, keyed by parameter name."""

    states: Collection[str] = ()
    """Names of the untrained tensors, such as expert biases, that the source contains. Untrained tensors of the model
    that are not listed here are initialized by the target."""

    origin: Origin = Origin()
    """Hugging Face model from which the weights were loaded. `origin.model_type` is None if the weights do not come
    from a Hugging Face model."""

    side_files: Mapping[str, Path] = {}
    """Tokenizer and generation files to copy into the output folder, keyed by their names in a Hugging Face folder."""

    notes: tuple[str, ...] = ()
    """Messages about this source to show to the user."""

    progress: Progress | None = None
    """Progress of the run that saved the weights, or None if the source does not record it."""

    merged: Mapping[str, object] | None = None
    """Description of the merged checkpoints, which is stored in the metadata of the output. The description consists of
    JSON types, and is None if no checkpoints were merged."""

    def training(self) -> TrainingState | None:
        """Return the training state, or None if the source has no training state. Raises ValueError if the training
        state cannot be read."""
        return None

    @abstractmethod
    def dtype(self, name: str, wanted: torch.dtype | None) -> torch.dtype:
        """Return the dtype in which `read` returns a parameter. The dtype is `wanted`, or the stored dtype if `wanted`
        is None."""

    @abstractmethod
    def read(self, name: str, wanted: torch.dtype | None) -> Tensor:
        """Return the complete, unsharded tensor of a parameter or an optimizer state. Raises ValueError if the stored
        data is invalid, and OSError if it cannot be read."""

    def read_state(self, meta: ParamMeta, dtype: torch.dtype) -> Tensor:
        """Return an untrained tensor of the model. If the source does not contain the tensor, return zeros, because
        untrained tensors are initialized to zero."""
        if meta.name in self.states:
            return self.read(meta.name, dtype)
        from torch import zeros

        return zeros(meta.global_shape, dtype=dtype)

    @abstractmethod
    def check_data(self) -> None:
        """Raise ValueError if the weights have a problem that can be detected only by reading them."""


def few(problems: Sequence[str], limit: int) -> str:
    """Join the first `limit` problems into one line, followed by the number of omitted problems."""
    return "; ".join(problems[:limit]) + (f"; and {len(problems) - limit} more" if len(problems) > limit else "")


Written = Callable[[int], None]
"""Function that is called after each written tensor, with the size of the tensor in bytes."""


class Target(ABC):
    """Output of a conversion. The constructor plans the output, and raises ValueError if the format cannot express the
    model."""

    nbytes: int
    """Total size of all tensors in bytes."""

    notes: tuple[str, ...] = ()
    """Messages about this target to show to the user."""

    @abstractmethod
    def write(self, folder: Path, world: Axis, written: Written) -> None:
        """Write the weights. Each process of `world` writes a part of the weights, so all processes of `world` must
        call this method."""

    @abstractmethod
    def finish(self, folder: Path) -> None:
        """Write all files of the output that do not contain weights. The conversion calls this method once, after the
        weights are written."""


@runtime_checkable
class Format(Protocol):
    """Protocol of a model format that conversions can read and write. Entries of `PATH_KINDS`, each of which recognizes
    one kind of path, may implement this protocol."""

    @property
    def format(self) -> str:
        """Name of the format. This name is a possible value of --to."""

    @property
    def usual(self) -> bool:
        """True if this format is the default target for checkpoints of this program."""

    def open(self, path: PurePath, options: Options) -> Source:
        """Open a model. Checkpoints of this program may be in any storage; models in other formats must be on the local
        disk."""

    def plan(self, source: Source, folder: Path, options: Options) -> Target:
        """Plan the conversion of `source` to this format. The output will be written to `folder`."""


MERGE_FILE = "merge.json"
"""Name of the file in the output that describes the merged checkpoints (`Source.merged`). All formats use the same file
name."""

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
    """Yield the paths of the tokenizer files in a folder."""
    return (folder / name for name in TOKENIZER_FILES if (folder / name).is_file())


def tokenizer_config(folder: PurePath, names: Collection[str] | None = None) -> TokenizerConfig:
    """Return the tokenizer flags for a Hugging Face folder. `names` contains the names of the files in the folder. If
    `names` is None, this function lists the folder.

    If tokenizer files are missing from the folder, the returned flags do not select a tokenizer.
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
    """Return the paths of a run's tokenizer files, keyed by their names in a Hugging Face folder. Files that do not
    exist are omitted."""
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
