"""Functions that recognize the kind of a path: a checkpoint, a run, an indexed dataset, or a kind that an extension
adds. This module also defines the names of checkpoint folders and files. This module does not import torch.

Every flag and tool that takes a path calls this module, so that they all classify paths alike. An extension adds a kind
of path as follows:

    @PATH_KINDS.register("archive", about="is an archive of text", order=46)
    def is_archive(path: str) -> bool:
        return path.endswith(".zip")
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Protocol, TypeVar

from megatron.core.config.data import DatasetConfig, TokenizerConfig
from megatron.core.dist_checkpointing.file_storage import UrlPath, located, resolved, storage_of
from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.registry import Registry

METRICS_FILE = "metrics.jsonl"
RUN_CONFIG = "run_config.yaml"
EVENTS = "run_events.jsonl"
OUTCOME = "outcome"
LEASE = ".lease"

TOKENIZER_FOLDER = "tokenizer"
"""Name of the folder, next to the checkpoints, in which a run stores its tokenizer files."""

Folder = TypeVar("Folder", bound=PurePath)


@dataclass(frozen=True)
class KindFacts:
    about: str
    """Description of what a path of this kind contains, such as "is an archive of text". In a message, the description
    follows the path."""

    order: int
    """Position of this kind in the order in which the kinds of paths are tried. If a path matches several kinds, the
    kind with the smallest `order` is used.

    The built-in kinds have the numbers 0 (URL), 10 (indexed dataset), 20 (checkpoint), 30 (folder of checkpoints), 40
    (run), 50 (empty folder), 60 (other folder), 70 (nothing) and 80 (other file).
    """

    loaded_as: str = ""
    """Name of this kind in messages about --load; empty if --load does not accept paths of this kind."""

    convert: str = ""
    """Command that converts a model of this kind to a checkpoint, if --load does not accept it directly. In the
    command, {path} is replaced with the path of the model."""

    @property
    def model(self) -> bool:
        """True if the path contains a model's weights."""
        return bool(self.loaded_as or self.convert)


class PathKind(Protocol):
    """Interface of classes and functions that recognize one kind of path. `DataKind`, and the classes for model files
    that --load accepts, add methods to this interface."""

    def __call__(self, path: str, /) -> bool:
        """Return whether a path is of this kind. The path need not exist, and may also be a pattern or a URL."""


PATH_KINDS = Registry("kind of path", KindFacts, protocol=PathKind)


class DataReader(Protocol):
    """Interface of readers that make indexed datasets from files in other formats."""

    def prefix(self, flag: str, path: str, /) -> str:
        """Return the prefix of the dataset made from the files that a path names. Create the dataset if it does not
        exist. The method raises ValueError, with `flag` in the message, if the dataset cannot be created.
        """


class DataKind(ABC):
    """A kind of path, other than the prefix of an indexed dataset, that --data-path accepts."""

    urls = False
    """True if the kind supports URLs. If no kind recognizes a URL, the error is raised by the kind with the highest
    `order` that supports URLs."""

    @abstractmethod
    def __call__(self, path: str) -> bool: ...

    @abstractmethod
    def describe(self, flag: str, path: str) -> str:
        """Return a one-line description of the files at `path`, for example for a log. The method raises ValueError,
        with `flag` in the message, if the files cannot be found."""

    @abstractmethod
    def reader(
        self, data: DatasetConfig, tokenizer: TokenizerConfig, vocab_size: int | None, prepare: Callable[[], object]
    ) -> DataReader:
        """Return a reader configured by the flags. Each process that the reader starts must call `prepare()` first.

        Args:
            data: Data options.
            tokenizer: Tokenizer options.
            vocab_size: Vocabulary size, if it is known.
            prepare: Initialization function, which every process that the reader starts must call first.
        """


OURS = ("checkpoint", "checkpoints")

RUNS = ("checkpoints", "run")
"""Kinds of paths that a run's --save folder may have."""

TEXTS = ("text", "url")
"""Kinds of paths, other than prefixes of indexed datasets, that may be passed to --data-path."""


def kind_of(path: str | PurePath) -> str:
    """Return the kind of a path, which is a name in `PATH_KINDS`."""
    names = sorted(PATH_KINDS, key=lambda name: PATH_KINDS.facts(name).order)
    return next(name for name in names if PATH_KINDS[name](str(path)))


def _is_dataset(path: str) -> bool:
    ends = path.endswith((".bin", ".idx"))
    try:
        return _is_file(f"{path}.idx") or (ends and _is_file(f"{path[:-4]}.idx"))
    except OSError as error:  # raised for paths in a storage; the message must show the path that the user passed
        raise OSError(str(error).replace(f"{path}.idx", path)) from error


def _is_checkpoint(path: str) -> bool:
    return is_checkpoint(named_folder(located(path)))


def _has_checkpoints(path: str) -> bool:
    root = located(path)
    return storage_of(root).exists(root / LATEST) or bool(saved_folders(root))


def _is_run(path: str) -> bool:
    root = located(path)
    return any(storage_of(root).exists(root / name) for name in (METRICS_FILE, RUN_CONFIG, EVENTS, OUTCOME))


def _is_empty(path: str) -> bool:
    return os.path.isdir(path) and not os.listdir(path)


def _is_other_url(path: str) -> bool:
    return "://" in path and not isinstance(located(path), UrlPath)


def _is_folder(path: str) -> bool:
    root = located(path)
    return os.path.isdir(root) if isinstance(root, Path) else bool(storage_of(root).names(root))


def _is_file(path: str | PurePath) -> bool:
    file = located(path)
    return os.path.isfile(file) if isinstance(file, Path) else storage_of(file).size(file) is not None


def _is_missing(path: str) -> bool:
    root = located(path)
    return not storage_of(root).exists(root)


for _order, (_name, _holds, _about, _loaded_as) in enumerate(
    (
        ("url", _is_other_url, "is a URL", ""),
        ("dataset", _is_dataset, "is an indexed dataset", ""),
        ("checkpoint", _is_checkpoint, "is a checkpoint", "a checkpoint"),
        ("checkpoints", _has_checkpoints, "is a folder of checkpoints", "a folder of checkpoints"),
        ("run", _is_run, "is the folder of a run that has saved no checkpoint", ""),
        ("empty", _is_empty, "is an empty folder", ""),
        ("folder", _is_folder, "is a folder without a model, a run or text", ""),
        ("missing", _is_missing, "is missing: there is no such file or folder", ""),
        ("file", lambda path: True, "is a file of unknown kind", ""),
    )
):
    PATH_KINDS.register(_name, _holds, about=_about, order=10 * _order, loaded_as=_loaded_as)


def data_kind_of(path: str | PurePath) -> DataKind | None:
    """Return the `DataKind` that makes an indexed dataset from a path. Return None if the path is already an indexed
    dataset, or if no kind can make a dataset from it.
    """
    is_url = "://" in str(path)  # with any scheme
    kind = "url" if is_url else kind_of(path)
    kinds = [(name, PATH_KINDS[name]) for name in sorted(PATH_KINDS, key=lambda name: PATH_KINDS.facts(name).order)]
    found = [each for name, each in kinds if isinstance(each, DataKind) and (name == kind or (is_url and each.urls))]
    if not is_url:
        return next(iter(found), None)
    claims = [each for each in found if each(str(path))]
    return next(iter(claims or ([] if _is_dataset(str(path)) else reversed(found))), None)


def is_foreign_model(path: str | PurePath) -> bool:
    """Return whether the path is a model that --load accepts although the model is not in the checkpoint format of this
    library."""
    kind = kind_of(path)
    return kind not in OURS and bool(PATH_KINDS.facts(kind).loaded_as)


def refusal(path: str | PurePath, remedy: str | None = None) -> str:
    """Return a message that explains why a flag or tool rejects a path, followed by `remedy`. By default, the remedy
    lists the kinds of paths that --load accepts."""
    kind, folder = kind_of(path), located(path).parent
    if remedy is None:
        *others, last = filter(None, (PATH_KINDS.facts(name).loaded_as for name in PATH_KINDS))
        remedy = f"give {', '.join(others)} or {last}"
    if convert := PATH_KINDS.facts(kind).convert:
        remedy = f"convert it: {convert.format(path=path)}"
    elif _is_file(path) and (PATH_KINDS.facts(kind_of(folder)).loaded_as or kind_of(folder) in RUNS):
        remedy = f"did you mean its folder, {folder if folder.name else resolved(folder)}?"
    elif kind in TEXTS:
        remedy += "; --data-path and tools/preprocess_data.py take text"
    return f"{path} {PATH_KINDS.facts(kind).about}; {remedy}"


LATEST = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"


def checkpoint_folder(root: Folder, iteration: int) -> Folder:
    """Return the checkpoint folder of an iteration."""
    return root / f"iter_{iteration:07d}"


def saved_folders(root: Folder) -> dict[int, Folder]:
    """Return the folders of all published checkpoints in `root`, keyed by iteration."""
    found, storage = dict[int, Folder](), storage_of(root)
    for name in storage.names(root):  # X before X.old
        if (match := re.fullmatch(r"iter_(\d+)(\.old)?", name)) and storage.finished(root / name):
            found.setdefault(int(match[1]), root / name)
    return found


def is_checkpoint(path: PurePath) -> bool:
    """Return whether a folder is a complete or incomplete checkpoint, rather than a folder of checkpoints."""
    return any(storage_of(path).exists(path / name) for name in (METADATA, MANIFEST))


def named_folder(path: Folder) -> Folder:
    """Return the folder to which a path refers.

    File systems without links use a text file `path`.txt in place of a link. The text file contains the name of a
    checkpoint in the same folder. If `path` does not exist, but the text file does, the path of this checkpoint is
    returned.
    """
    storage = storage_of(path)
    if os.path.lexists(path) if isinstance(path, Path) else storage.exists(path):
        return path
    try:
        name = storage.read(path.with_name(f"{path.name}.txt")).decode(errors="replace")[:100].strip()
    except (OSError, ValueError):
        return path
    return path.with_name(name) if re.fullmatch(r"iter_\d+", name) else path


def latest_text(root: PurePath) -> str:
    """Return the content of the text file that names the newest checkpoint in `root`; empty if it cannot be read."""
    try:
        return storage_of(root).read(root / LATEST).decode(errors="replace").strip()
    except OSError:
        return ""


def read_latest(root: PurePath) -> int | None:
    """Read the iteration of the newest complete checkpoint in `root` from the text file `LATEST`. Return None if there
    is no such file.

    The function raises ValueError if the file does not contain an iteration number.
    """
    path, storage = root / LATEST, storage_of(root)
    if not storage.exists(path):
        return None
    is_file = not isinstance(path, Path) or path.is_file()
    text = storage.read(path).decode(errors="replace").strip() if is_file else "something other than a file"
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(
            f"{path} must contain an iteration number, not {text[:40]!a}; write the number of one of "
            f"{[name for name in storage.names(root) if name.startswith('iter_')]} into it, or delete it"
        )
    return int(text)


@dataclass(frozen=True)
class Candidates:
    """Checkpoint folders to try, in order, and warnings about the folder that contains them."""

    folders: tuple[PurePath, ...]
    remarks: tuple[str, ...] = ()


def candidates(path: PurePath) -> Candidates:
    """List the checkpoints that `path` may refer to: `path` itself if it is a checkpoint, or all checkpoints in the
    folder `path` up to the latest one. The text file `LATEST` in the folder names the latest checkpoint. If the text
    file is missing or damaged, the checkpoint with the highest iteration is the latest. The function raises ValueError
    if the file is damaged and there is no checkpoint, or if `path` is a model that must be converted to a checkpoint
    first.
    """
    if PATH_KINDS.facts(kind_of(path)).convert:
        raise ValueError(refusal(path))
    if is_checkpoint(path := named_folder(path)):
        return Candidates((path,))
    saved = saved_folders(path)
    try:
        latest, remarks = read_latest(path), []
    except ValueError as error:
        if not saved:
            raise
        latest, remarks = None, [f"{error}; using the latest checkpoint found: {max(saved)}"]
    else:
        if latest is None and saved:
            remarks.append(f"there is no {LATEST} in {path}; using the latest checkpoint found: {max(saved)}")
    numbers = sorted((number for number in saved if latest is None or number <= latest), reverse=True)
    if latest is not None and latest not in saved:
        remarks.append(f"skipped checkpoint {latest} that {path / LATEST} names: its folder does not exist")
    return Candidates(tuple(saved[number] for number in numbers), tuple(remarks))
