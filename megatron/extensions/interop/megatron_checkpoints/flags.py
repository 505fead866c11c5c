"""Detection of Megatron-LM checkpoints, and registration of their format. This module neither defines flags nor imports
torch."""

from __future__ import annotations

import os
from pathlib import Path

from megatron.core.dist_checkpointing.path_kind import LATEST, METADATA, PATH_KINDS, read_latest

COMMON = "common.pt"
"""Name of the checkpoint file that contains everything except the tensors."""


def iteration_folder(path: Path) -> Path:
    """Return the latest checkpoint in the folder `path`, or `path` itself if it is a checkpoint."""
    try:
        text = (path / LATEST).read_text(errors="replace").strip()
        return path / ("release" if text == "release" else f"iter_{read_latest(path) or 0:07d}")
    except (OSError, ValueError):
        # The tracker file, which names the latest checkpoint, is missing or invalid.
        return path


def is_megatron(path: str) -> bool:
    """Return True if a folder is a Megatron-LM checkpoint or contains Megatron-LM checkpoints."""
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
