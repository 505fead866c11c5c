"""Whole files, writes that survive a power cut, and errors of those for which there is no room."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}
"""Errors of writing to an open file, in which the system does not name it."""


def name_full_file(error: BaseException, path: Path | str) -> None:
    """Adds the file to an error of writing where there is no room, so that messages say which one."""
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
        error.filename = str(path)


@contextmanager
def whole_file(path: Path, synced: bool = False) -> Iterator[Path]:
    """Yields the path to write the content of `path` to: a file beside it that replaces it at the end, so that readers
    never see a part of it. If writing fails, nothing is left behind. With `synced` the content is on disk before.

    A link, and what exists and is no regular file, such as /dev/null or a named pipe, is never replaced: `path` itself
    is yielded."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    temporary = path.with_name(
        f".{path.name}.{os.urandom(16).hex()}.tmp"
    )  # hosts that share a disk have equal process ids
    try:
        yield temporary
        if synced:
            with open(temporary, "rb") as stream:
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        name_full_file(error, path)
        raise
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk: a file created or renamed in it is durable only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
