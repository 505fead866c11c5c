"""Output folders in storages other than the local disk: written to a temporary folder, then uploaded.

The folder contains `.unfinished` until all its files are there. A failed upload leaves no folder.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import CHUNK
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of


@contextmanager
def written_locally(output: PurePath, force: bool | None = False) -> Iterator[Path]:
    """Yield the folder to write: `output` if it is local, else a temporary folder that is uploaded if the body
    succeeds.

    Raises ValueError if `output` cannot be written, or if it exists and is not a model that `force` permits to replace.
    """
    if isinstance(output, Path):
        yield output
        return
    try:
        if storage_of(output).names(output):
            if not force:
                raise ValueError(f"--output {output} exists already; choose another folder")
            if not PATH_KINDS.facts(kind_of(output)).model and storage_of(output).finished(output):
                rule = "holds no model, so that it is not replaced"
                raise ValueError(f"--output {output} {rule}; choose another folder")
        with tempfile.TemporaryDirectory(prefix="upload-") as scratch:
            folder = Path(scratch, output.name or "output")
            yield folder
            if folder.is_dir():
                upload(folder, output)
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error}; nothing of it was kept") from error


def upload(folder: Path, final: PurePath) -> None:
    """Publish a copy of a folder. Raises OSError and leaves no copy if that fails."""
    storage = storage_of(final)
    storage.begin(final, keeps_names=True)
    try:
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            with file.open("rb") as source, storage.create(final.joinpath(*file.relative_to(folder).parts)) as target:
                shutil.copyfileobj(source, target, CHUNK)
        storage.publish(final)
    except OSError:
        with suppress(OSError):
            storage.discard(final)
        raise
