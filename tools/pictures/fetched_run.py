"""Copy the files that a report needs to the local disk if the run's folder is in remote storage. This module does not
import torch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.path_kind import EVENTS, LATEST, METADATA, METRICS_FILE, RUN_CONFIG, saved_folders

SMALL = 64 << 20
"""Maximum size, in bytes, of a copied file."""


@contextmanager
def local_run(root: PurePath) -> Iterator[Path]:
    """Yield a local folder with the files of a run. The folder is `root` if `root` is on the local disk, and otherwise
    a temporary copy without the contents of tensor files. Raises ValueError if the storage does not answer."""
    if isinstance(root, Path):
        yield root
        return
    with tempfile.TemporaryDirectory(prefix="run-") as scratch:
        folder = Path(scratch, root.name or "run")
        folder.mkdir()
        try:
            _copy(root, folder)
        except OSError as error:
            raise ValueError(f"{root} cannot be read: {error}") from None
        yield folder


def _copy(root: PurePath, folder: Path) -> None:
    """Copy the small files of a run. In place of each tensor file, create an empty sparse file of the same size."""
    storage = storage_of(root)
    for name in (METRICS_FILE, RUN_CONFIG, EVENTS, LATEST, "outcome"):
        if 0 < (storage.size(root / name) or 0) <= SMALL:
            (folder / name).write_bytes(storage.read(root / name))
    for checkpoint in saved_folders(root).values():
        copy = folder / checkpoint.name
        copy.mkdir()
        for name in storage.names(checkpoint):
            if name in (METADATA, MANIFEST):
                (copy / name).write_bytes(storage.read(checkpoint / name))
            elif (size := storage.size(checkpoint / name)) is not None:
                with (copy / name).open("wb") as file:
                    file.truncate(size)
