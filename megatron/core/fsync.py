"""Atomic file replacement, writes that survive a power failure, and disk-full errors that name the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}
"""Error numbers for a full disk, an exhausted quota, or a file that is too large. An OSError with one of these numbers
does not contain the file name."""


def name_full_file(error: BaseException, path: Path | str) -> None:
    """Add the file name to disk-full errors, so that the message names the file."""
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
        error.filename = str(path)


@contextmanager
def whole_file(path: Path, synced: bool = False) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`. When the context exits, the temporary file replaces `path`, so
    other processes never read a partial file. If an exception is raised in the context, the temporary file is deleted.
    With `synced`, the content is flushed to disk before the file replaces `path`.

    If `path` is a link or a special file, such as /dev/null or a named pipe, the function yields `path` itself."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    temporary = path.with_name(
        f".{path.name}.{os.urandom(16).hex()}.tmp"
    )  # random, because processes on other hosts may have the same process id
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
    """Flush a folder to disk with fsync. A file that was created or renamed in the folder is durable only after this
    call."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
