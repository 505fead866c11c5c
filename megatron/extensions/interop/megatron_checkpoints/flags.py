"""Recognizes checkpoints of Megatron-LM, and says where their format is. No flags and no torch."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.dist_checkpointing.path_kind import LATEST, METADATA, PATH_KINDS, read_latest

COMMON = "common.pt"
"""File with everything that is not a tensor."""


def iteration_folder(path: Path) -> Path:
    """The checkpoint that `path` may mean: itself, or the latest of a folder."""
    try:
        text = (path / LATEST).read_text(errors="replace").strip()
        return path / ("release" if text == "release" else f"iter_{read_latest(path) or 0:07d}")
    except (OSError, ValueError):  # there is none, or it names none
        return path


def is_megatron(path: str) -> bool:
    """Return whether a folder is a checkpoint of Megatron-LM, or holds some."""
    if not os.path.isdir(path):
        return False
    folder = iteration_folder(Path(path))
    if os.path.exists(folder / COMMON) or any(folder.glob("mp_rank_*")):
        return True
    try:
        return '"sharded_backend"' in (folder / METADATA).read_text(errors="replace")
    except OSError:
        return False


PATH_KINDS.register(
    "megatron",
    f"{__package__}.path_kind:MEGATRON",
    about="is a checkpoint of Megatron-LM",
    order=15,
    convert="tools/convert_checkpoint.py --input {path} --output FOLDER",
)
