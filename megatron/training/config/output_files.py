"""Writing of output files: whole or not there, and straight into devices, pipes and links. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yields the path to write the content of `path` to: a file beside it that replaces it at the end, so that readers
    never see a part of it. If writing fails, nothing is left behind.

    A link, and what exists and is no regular file, such as /dev/null or a named pipe, is never replaced: `path` itself
    is yielded."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
