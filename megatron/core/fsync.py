"""Writes that survive a power cut, and errors of those for which there is no room."""

from __future__ import annotations

import errno
import os
from pathlib import Path

NO_ROOM = {errno.EDQUOT, errno.EFBIG, errno.ENOSPC}
"""Errors of writing to an open file, in which the system does not name it."""


def name_full_file(error: BaseException, path: Path | str) -> None:
    """Adds the file to an error of writing where there is no room, so that messages say which one."""
    if isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is None:
        error.filename = str(path)


def sync_folder(folder: Path) -> None:
    """Syncs a folder to disk: a file created or renamed in it is durable only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
