"""Names of the folders and files of checkpoints. No torch."""

from __future__ import annotations

import re
from pathlib import Path

from megatron.core.dist_checkpointing.integrity import MANIFEST

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


def is_checkpoint(path: Path) -> bool:
    """Whether a folder is a checkpoint, complete or not, and not one that holds some."""
    return (path / METADATA).exists() or (path / MANIFEST).exists()


def read_latest(root: Path) -> int | None:
    """Iteration of the newest complete checkpoint in `root`, from its text file; None without that file. Raises
    ValueError if the file holds no number."""
    path = root / LATEST
    if not path.exists():
        return None
    text = path.read_text(errors="replace").strip() if path.is_file() else "something else than a file"
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValueError(
            f"{path} must hold the number of an iteration, not {text[:40]!a}; write the number of one of "
            f"{sorted(found.name for found in root.glob('iter_*'))} into it, or delete it"
        )
    return int(text)
