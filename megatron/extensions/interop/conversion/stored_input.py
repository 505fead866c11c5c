"""Local copies of Hugging Face folders in remote storage. All processes on a host share the same copy of a folder.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import local_folder


def local_model(folder: PurePath) -> Path:
    """Return a model's folder on the local disk. For a remote folder, the returned folder contains links to local
    copies of the files.

    Raises ValueError if the model cannot be read.
    """
    return _local(folder, _of_model)


def local_config(folder: PurePath) -> Path:
    """Return a model's folder on the local disk. Unlike `local_model`, this function does not copy the weights of a
    remote folder."""
    return _local(folder, _of_config)


def _local(folder: PurePath, wanted: Callable[[str], bool]) -> Path:
    try:
        return local_folder(folder, wanted)
    except OSError as error:
        raise ValueError(f"{folder}: cannot be read: {error}") from None


def _of_model(name: str) -> bool:
    return name.endswith((".safetensors", ".bin")) or _of_config(name)


def _of_config(name: str) -> bool:
    return name.endswith((".json", ".jinja", ".txt", ".model"))
