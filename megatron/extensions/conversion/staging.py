"""Output folders that appear complete or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.dist_checkpointing.path_kind import PATH_KINDS, kind_of
from megatron.core.fsync import sync_folder
from megatron.training.config.output_files import why_unwritable


@contextmanager
def new_folder(final: Path, force: bool = False) -> Iterator[Path]:
    """Yields a temporary folder beside `final`, and renames it to `final` if the body succeeds.

    If the body fails, the temporary folder is deleted. One that a killed process left is deleted by the next one. With
    `force` an existing model folder is replaced; at no moment is `final` half-written. Raises ValueError otherwise.
    """
    refuse(final, force)
    scratch = final.with_name(f".{final.name}.incomplete")
    final.parent.mkdir(parents=True, exist_ok=True)
    if scratch.exists():
        with _locked(scratch, final):
            shutil.rmtree(scratch)
    scratch.mkdir()
    with _locked(scratch, final):
        try:
            yield scratch
            for folder in (scratch, *(path for path in scratch.rglob("*") if path.is_dir())):
                sync_folder(folder)
            _publish(scratch, final, force)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def refuse(final: Path, force: bool) -> None:
    """Raises ValueError if `final` must not or cannot be written. `force` allows to replace a model folder, and nothing
    else."""
    try:
        vacant = not final.exists() or (final.is_dir() and not any(final.iterdir()))
        why = why_unwritable(final.absolute().parent)
    except OSError as error:
        shown = final if len(str(final)) <= 80 else f"{str(final)[:77]}..."
        raise ValueError(f"--output {shown}: {str(error.strerror).lower()}; choose another folder") from None
    if why:
        raise ValueError(f"--output {final}: {why}; choose another folder")
    if vacant:
        return
    if not force:
        raise ValueError(f"--output {final} exists already; choose another folder, or replace it with --force")
    if not PATH_KINDS.facts(kind_of(final)).model:
        raise ValueError(f"--output {final} holds no model, so that --force does not replace it; choose another folder")


def _publish(scratch: Path, final: Path, force: bool) -> None:
    refuse(final, force)
    replaced = final.with_name(f".{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    scratch.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _locked(folder: Path, final: Path) -> Iterator[None]:
    """Holds a lock on a folder. Raises ValueError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"--output {final} is being written by another process") from None
    else:
        yield
    finally:
        os.close(descriptor)
