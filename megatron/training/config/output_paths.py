"""Checks before start-up that the output paths given by flags can be written. No torch."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatron.training.config.flags import all_flags, value_of
from megatron.training.config.problem import NO_URL, Problem
from megatron.training.config.run_config import RunConfig


def why_unwritable(folder: Path) -> str | None:
    """Reason why no file can be created in a folder, which may not exist yet; None if one can. Leaves no files."""
    if folder.parts and folder.parts[0].endswith(":") and not Path(folder.parts[0]).exists():  # s3://bucket as a Path
        return f"{folder} {NO_URL[0]}"
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is a file, not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".written-", dir=nearest) as probe:
            (Path(probe) / "page").write_bytes(bytes(4096))  # a full disk takes a folder, and no page
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror})"
    return None


def why_not_written(path: Path) -> str | None:
    """Reason why a file cannot be written, in a folder that may not exist yet; None if it can."""
    if path.exists():
        return f"{path} is not a file that can be written" if path.is_dir() or not os.access(path, os.W_OK) else None
    return why_unwritable(path.parent)


def unwritable(config: RunConfig) -> Iterator[Problem]:
    """Yields a problem for each output path that cannot be written or is a file instead of a folder."""
    for flag in (flag for flag in all_flags() if flag.spec.writes):
        path, folder = value_of(config, flag), flag.spec.writes == "folder"
        if path and not folder and Path(path).is_dir():
            yield Problem(flag.name, path, "is a folder", "use a file in it")
        elif path and (why := why_unwritable(Path(path) if folder else Path(path).parent)):
            remedy = f"use a {'folder' if folder else 'file in a folder'} that can be written"
            yield Problem(flag.name, path, why, remedy)
    load = config.checkpoint.load
    if load and Path(load).is_file():
        yield Problem("--load", load, "is a file", "use the folder of the checkpoints, or one checkpoint")
