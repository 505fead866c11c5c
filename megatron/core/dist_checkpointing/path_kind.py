"""Recognizes what a path holds: a checkpoint, a run, an indexed dataset, or what extensions add. Names the folders and
files of checkpoints. This module does not import torch.

Every flag and tool that takes a path asks here, so that all of them take the same things for the same. An extension
adds a kind:

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
"""Name of the folder beside the checkpoints where a run keeps its tokenizer's files."""

Folder = TypeVar("Folder", bound=PurePath)


@dataclass(frozen=True)
class KindFacts:
    about: str
    """Description of the path's contents, which follows the path in a message."""

    order: int
    """A path that holds several kinds is of the one with the smallest number. Those of the library are 0, 10, ...: URL,
    indexed dataset, checkpoint, folder of checkpoints, run (40), empty folder, other folder, nothing, other file."""

    loaded_as: str = ""
    """Name of this kind in messages, if --load accepts it."""

    convert: str = ""
    """The command that makes a checkpoint of it, if it is a model that --load does not take; {path} is its path."""

    @property
    def model(self) -> bool:
        """True if it has the weights of a model."""
        return bool(self.loaded_as or self.convert)


class PathKind(Protocol):
    """Recognizes one kind of path. A `DataKind`, or a kind of models that --load takes, has more methods."""

    def __call__(self, path: str, /) -> bool:
        """Return whether a path is of this kind. It may not exist, or be a pattern or a URL."""


PATH_KINDS = Registry("kind of path", KindFacts, protocol=PathKind)


class DataReader(Protocol):
    """Makes indexed datasets of files."""

    def prefix(self, flag: str, path: str, /) -> str:
        """The prefix of the dataset of the files that a path names, made now if nothing has made it. Raises ValueError,
        which names the flag."""


class DataKind(ABC):
    """A kind of path that --data-path takes beside the prefix of an indexed dataset."""

    urls = False
    """True if it reads URLs."""

    @abstractmethod
    def __call__(self, path: str) -> bool: ...

    @abstractmethod
    def describe(self, flag: str, path: str) -> str:
        """A line about the files of a path. Raises ValueError, which names the flag."""

    @abstractmethod
    def reader(
        self, data: DatasetConfig, tokenizer: TokenizerConfig, vocab_size: int | None, prepare: Callable[[], object]
    ) -> DataReader:
        """Reads files as flags say. `prepare()` is due first in each process that the reader starts."""


OURS = ("checkpoint", "checkpoints")

RUNS = ("checkpoints", "run")
"""Contents of a run's --save folder."""

TEXTS = ("text", "url")
"""Values of --data-path other than the prefix of an indexed dataset."""


def kind_of(path: str | PurePath) -> str:
    """The kind of a path, as its name in `PATH_KINDS`."""
    names = sorted(PATH_KINDS, key=lambda name: PATH_KINDS.facts(name).order)
    return next(name for name in names if PATH_KINDS[name](str(path)))


def _is_dataset(path: str) -> bool:
    ends = path.endswith((".bin", ".idx"))
    try:
        return _is_file(f"{path}.idx") or (ends and _is_file(f"{path[:-4]}.idx"))
    except OSError as error:  # of a storage; messages name the path that the user gave
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
        ("file", lambda path: True, "is a file of no known kind", ""),
    )
):
    PATH_KINDS.register(_name, _holds, about=_about, order=10 * _order, loaded_as=_loaded_as)


def data_kind_of(path: str | PurePath) -> DataKind | None:
    """The kind of a path from which an indexed dataset is made; None if it is one, or if nothing makes one."""
    is_url = "://" in str(path)  # of any scheme
    kind = "url" if is_url else kind_of(path)
    for name in PATH_KINDS:
        found = PATH_KINDS[name]
        if isinstance(found, DataKind) and (name == kind or (is_url and found.urls)):
            return None if is_url and not found(str(path)) and _is_dataset(str(path)) else found
    return None


def is_foreign_model(path: str | PurePath) -> bool:
    """Return whether --load takes a path that is no checkpoint of ours."""
    kind = kind_of(path)
    return kind not in OURS and bool(PATH_KINDS.facts(kind).loaded_as)


def refusal(path: str | PurePath, remedy: str | None = None) -> str:
    """Why a path is not what a flag or a tool takes, and what to give instead: by default what --load takes."""
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
    """Folder of the checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def saved_folders(root: Folder) -> dict[int, Folder]:
    """Maps iteration to folder for every published checkpoint in `root`."""
    found, storage = dict[int, Folder](), storage_of(root)
    for name in storage.names(root):  # X before X.old
        if (match := re.fullmatch(r"iter_(\d+)(\.old)?", name)) and storage.finished(root / name):
            found.setdefault(int(match[1]), root / name)
    return found


def is_checkpoint(path: PurePath) -> bool:
    """Return whether a folder is a checkpoint, complete or not, and not one that holds some."""
    return any(storage_of(path).exists(path / name) for name in (METADATA, MANIFEST))


def named_folder(path: Folder) -> Folder:
    """The folder that a path means: itself, or, if nothing is there, the checkpoint beside it whose name is in the text
    file `path` with the suffix .txt. Such a file replaces a link on file systems without links."""
    storage = storage_of(path)
    if os.path.lexists(path) if isinstance(path, Path) else storage.exists(path):
        return path
    try:
        name = storage.read(path.with_name(f"{path.name}.txt")).decode(errors="replace")[:100].strip()
    except (OSError, ValueError):
        return path
    return path.with_name(name) if re.fullmatch(r"iter_\d+", name) else path


def latest_text(root: PurePath) -> str:
    """Content of the text file that names the newest checkpoint in `root`; empty if it cannot be read."""
    try:
        return storage_of(root).read(root / LATEST).decode(errors="replace").strip()
    except OSError:
        return ""


def read_latest(root: PurePath) -> int | None:
    """Iteration of the newest complete checkpoint in `root`, from its text file; None without that file. Raises
    ValueError if the file holds no number."""
    path, storage = root / LATEST, storage_of(root)
    if not storage.exists(path):
        return None
    is_file = not isinstance(path, Path) or path.is_file()
    text = storage.read(path).decode(errors="replace").strip() if is_file else "something else than a file"
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(
            f"{path} must hold the number of an iteration, not {text[:40]!a}; write the number of one of "
            f"{[name for name in storage.names(root) if name.startswith('iter_')]} into it, or delete it"
        )
    return int(text)


@dataclass(frozen=True)
class Candidates:
    """Checkpoint folders to try, in order, and remarks about the folder that holds them."""

    folders: tuple[PurePath, ...]
    remarks: tuple[str, ...] = ()


def candidates(path: PurePath) -> Candidates:
    """Lists the checkpoints that `path` may mean: itself, or, of a folder of checkpoints, the latest and earlier ones.

    The latest is the one that the text file names, or the newest where that file is missing or damaged. Raises
    ValueError if the file is damaged and there is no checkpoint, or if the checkpoints are another program's.
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
        latest, remarks = None, [f"{error}; taken as the latest: {max(saved)}"]
    else:
        if latest is None and saved:
            remarks.append(f"there is no {LATEST} in {path}; taken as the latest: {max(saved)}")
    numbers = sorted((number for number in saved if latest is None or number <= latest), reverse=True)
    if latest is not None and latest not in saved:
        remarks.append(f"skipped checkpoint {latest} that {path / LATEST} names: there is no folder of it")
    return Candidates(tuple(saved[number] for number in numbers), tuple(remarks))
