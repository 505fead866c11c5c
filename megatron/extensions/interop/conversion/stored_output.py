"""Output folders in remote storage. The files are written to a local temporary folder and then uploaded.

The output contains a file `.unfinished` until all files are uploaded. If the upload fails, the folder is removed.
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
    """Context manager that yields a local folder, into which the `with` block writes its output. If `output` is local,
    the yielded folder is `output` itself. If `output` is remote, the yielded folder is temporary, and is uploaded to
    `output` if the block succeeds.

    Raises ValueError if `output` cannot be written. Also raises ValueError if `output` exists, unless `output` is a
    model and `force` permits replacing it.
    """
    if isinstance(output, Path):
        yield output
        return
    try:
        if storage_of(output).names(output):
            if not force:
                raise ValueError(f"--output {output} exists already; choose another folder")
            if not PATH_KINDS.facts(kind_of(output)).model and storage_of(output).finished(output):
                rule = "contains no model, so it is not replaced"
                raise ValueError(f"--output {output} {rule}; choose another folder")
        with tempfile.TemporaryDirectory(prefix="upload-") as scratch:
            folder = Path(scratch, output.name or "output")
            yield folder
            if folder.is_dir():
                upload(folder, output)
    except OSError as error:
        raise ValueError(f"--output {output} cannot be written: {error}; the partial output was deleted") from error


def upload(folder: Path, final: PurePath) -> None:
    """Upload a folder. Raises OSError if the upload fails. In this case, the partial copy is deleted."""
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
