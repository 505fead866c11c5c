"""Recognizes what a path holds: a checkpoint, a Hugging Face model, a run, an indexed dataset, text. No torch.

Every flag and tool that takes a path asks here, so that all of them take the same things for the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from megatron.core.dist_checkpointing.folders import LATEST, METADATA, is_checkpoint, read_latest, saved_folders
from megatron.core.parts import DATA_READERS
from megatron.extensions.hugging_face.files import CONFIG

METRICS_FILE, RUN_CONFIG, EVENTS, OUTCOME = "metrics.jsonl", "run_config.yaml", "run_events.jsonl", "outcome"
COMMON = "common.pt"
"""File of Megatron-LM's checkpoints with everything that is not a tensor."""


class Kind(Enum):
    """What a path holds, in words that follow the path in a message."""

    MISSING = "is missing: there is no such file or folder"
    CHECKPOINT = "is a checkpoint"
    CHECKPOINTS = "is a folder of checkpoints"
    HUGGING_FACE = "is a Hugging Face model"
    MEGATRON = "is a checkpoint of Megatron-LM"
    RUN = "is the folder of a run that has saved no checkpoint"
    DATASET = "is an indexed dataset"
    TEXT = "is text"
    REMOTE = "is a URL"
    EMPTY = "is an empty folder"
    FOLDER = "is a folder without a model, a run or text"
    FILE = "is a file of no known kind"


OURS = (Kind.CHECKPOINT, Kind.CHECKPOINTS)
MODELS = (*OURS, Kind.HUGGING_FACE)
"""What --load takes."""

MODEL_REMEDY = "give a checkpoint, a folder of checkpoints or the folder of a Hugging Face model"

RUNS = (Kind.CHECKPOINTS, Kind.RUN)
"""What a run leaves in its --save folder."""

TEXTS = (Kind.TEXT, Kind.REMOTE)
"""What --data-path takes beside the prefix of an indexed dataset, where there is a reader of it."""


def kind_of(path: str | Path) -> Kind:
    """What a path holds. A folder with the files of several kinds is the first of: Megatron-LM's checkpoint, ours,
    a Hugging Face model, a run, text. A pattern of files is what its ending says."""
    name, path = str(path), Path(path)
    if "://" in name:
        return Kind.REMOTE
    if os.path.exists(f"{name}.idx") or (name.endswith((".bin", ".idx")) and os.path.exists(f"{name[:-4]}.idx")):
        return Kind.DATASET
    if os.path.isdir(path):
        return _kind_of_folder(path)
    if _reader_of(path) is not None:
        return Kind.TEXT
    return Kind.FILE if os.path.exists(path) else Kind.MISSING


def _kind_of_folder(path: Path) -> Kind:
    if _of_megatron(iteration_folder(path)):
        return Kind.MEGATRON
    if is_checkpoint(path):
        return Kind.CHECKPOINT
    if os.path.exists(path / LATEST) or saved_folders(path):
        return Kind.CHECKPOINTS
    if os.path.isfile(path / CONFIG):
        return Kind.HUGGING_FACE
    if any(os.path.exists(path / name) for name in (METRICS_FILE, RUN_CONFIG, EVENTS, OUTCOME)):
        return Kind.RUN
    if _reader_of(path) is not None:
        return Kind.TEXT
    return Kind.FOLDER if any(os.scandir(path)) else Kind.EMPTY


def reader_of(path: str | Path) -> str | None:
    """Name in `DATA_READERS` of what makes an indexed dataset of a path; None if it is one, or nothing does."""
    kind = kind_of(path)
    if kind is Kind.REMOTE:
        return next((name for name in DATA_READERS if DATA_READERS.facts(name).urls), None)
    return _reader_of(Path(path)) if kind is Kind.TEXT else None


def _reader_of(path: Path) -> str | None:
    """The reader of the first file in a folder, or of a file, that one knows by the end of its name."""
    readers = [(name, DATA_READERS.facts(name).suffixes) for name in DATA_READERS]
    found = (name for file in _files(path) for name, suffixes in readers if file.lower().endswith(suffixes))
    return next(found, None)


def _files(path: Path) -> Iterator[str]:
    """Names of the files in a folder, hidden ones excepted; a path that is none, or a pattern."""
    if not os.path.isdir(path):
        yield path.name
    for _, _, files in os.walk(path):
        yield from (file for file in files if not file.startswith("."))


def iteration_folder(path: Path) -> Path:
    """The checkpoint of Megatron-LM that `path` may mean: itself, or the latest of a folder."""
    try:
        text = (path / LATEST).read_text(errors="replace").strip()
        return path / ("release" if text == "release" else f"iter_{read_latest(path) or 0:07d}")
    except (OSError, ValueError):  # there is none, or it names none
        return path


def _of_megatron(folder: Path) -> bool:
    if os.path.exists(folder / COMMON) or any(folder.glob("mp_rank_*")):
        return True
    try:
        return '"sharded_backend"' in (folder / METADATA).read_text(errors="replace")
    except OSError:
        return False


def refusal(path: str | Path, remedy: str = MODEL_REMEDY) -> str:
    """Why a path is not what a flag or a tool takes, and what to give instead."""
    kind, folder = kind_of(path), Path(path).parent
    if kind is Kind.MEGATRON:
        remedy = f"convert it: tools/convert_checkpoint.py --input {path} --output FOLDER"
    elif os.path.isfile(path) and kind_of(folder) in (*MODELS, *RUNS):
        remedy = f"did you mean its folder, {folder}?"
    elif kind in TEXTS:
        remedy += "; --data-path and tools/preprocess_data.py take text"
    return f"{path} {kind.value}; {remedy}"
