"""Names of the folders and files of checkpoints. No torch."""

from __future__ import annotations

import re
from pathlib import Path

LATEST = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"


def checkpoint_folder(root: Path, iteration: int) -> Path:
    """Folder of the checkpoint of an iteration."""
    return root / f"iter_{iteration:07d}"


def saved_folders(root: Path) -> dict[int, Path]:
    """Maps iteration to folder for every published checkpoint in `root`."""
    found: dict[int, Path] = {}
    for folder in sorted(root.glob("iter_*")):  # X before X.old
        if match := re.fullmatch(r"iter_(\d+)(\.old)?", folder.name):
            found.setdefault(int(match[1]), folder)
    return found
