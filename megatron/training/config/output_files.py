"""Check that output paths in flags are writable, and report full disks and closed standard output. This module does not
import torch.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.file_storage import UrlPath, located, storage_of
from megatron.core.dist_checkpointing.path_kind import (
    EVENTS,
    LATEST,
    LEASE,
    METRICS_FILE,
    RUN_CONFIG,
    TOKENIZER_FOLDER,
)
from megatron.core.fsync import NO_ROOM
from megatron.training.config.flags import all_flags, value_of
from megatron.training.config.problem import NO_URL, Problem
from megatron.training.config.run_config import RunConfig

UNWRITABLE = NO_ROOM | {errno.EBADF, errno.EIO}
"""Values of `errno` that a failed write to an open output file may report."""


class OutputError(OSError):
    """Raised if a file that a flag names cannot be written; the message is one line for the user."""


def write_json(content: Mapping[str, object], json_file: str) -> None:
    """Write a command's JSON output to the file `json_file`, or to standard output if `json_file` is "". Raises
    OutputError."""
    text = json.dumps(content, indent=1) + "\n"
    if not json_file:
        print(text, end="")
        return
    try:
        Path(json_file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--json {json_file}: cannot be written: {error.strerror}") from error


def why_unwritten(error: OSError) -> str | None:
    """If the error means that output could not be written, return a line that reports this error; otherwise, return
    None."""
    if isinstance(error, OutputError):
        return str(error)
    if error.errno not in UNWRITABLE or error.filename is not None:
        return None
    return f"{'standard output' if _output_fails() else 'a file'}: cannot be written: {error.strerror}"


def _output_fails() -> bool:
    """Return True if a write to standard output fails. Output that could not be written remains in the buffer."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"")
    except io.UnsupportedOperation:  # standard output is not a file, so no disk can be full
        return False
    except OSError:
        return True
    return False


def open_closed_streams() -> bool:
    """Reopen standard streams that the shell has closed (`>&-`), which Python represents as None.

    If standard output was closed, later writes to it fail in the same way as writes to a full disk. If standard error
    was closed, all messages that are written to it are lost. Return True if standard output was closed.
    """
    closed = sys.stdout is None
    if closed:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    return closed


def drop_output() -> None:
    """Discard all further standard output, and the output that is still in the buffer, because writing it at exit would
    fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def why_unwritable(folder: Path) -> str | None:
    """Return the reason why no file can be created in a folder, which may not exist yet, or None if a file can be
    created. The function leaves no files behind."""
    if folder.parts and folder.parts[0].endswith(":") and not Path(folder.parts[0]).exists():  # a URL, e.g. s3://x
        return f"{folder} {NO_URL[0]}"
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return f"{nearest} is a file, not a folder"
    try:
        with tempfile.TemporaryDirectory(prefix=".written-", dir=nearest) as probe:
            (Path(probe) / "page").write_bytes(bytes(4096))  # a full disk may accept a folder, but no data
    except OSError as error:
        return f"{nearest} cannot be written ({error.strerror})"
    return None


def why_not_written(path: Path) -> str | None:
    """Return the reason why a file cannot be written, or None if the file can be written. The folder that will contain
    the file may not exist yet."""
    if path.exists():
        return f"{path} is not a file that can be written" if path.is_dir() or not os.access(path, os.W_OK) else None
    return why_unwritable(path.parent)


def _kind_of_no_file(path: Path) -> str | None:
    """Return the kind of a directory entry that is not a regular file. Return None for a regular file, or if the path
    does not exist."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "link to itself" if error.errno == errno.ELOOP else None
    return None if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "special file"


def _unreachable(name: str, given: str, folder: UrlPath) -> Iterator[Problem]:
    """Yield a problem if the storage for a URL does not respond, or if the run cannot write to this storage. The
    function leaves no files behind."""
    storage, probe = storage_of(folder), folder / f".written-{os.urandom(16).hex()}"
    try:
        storage.write(probe, b"")
        storage.remove(probe)
    except OSError as error:
        yield Problem(name, given, f"cannot be written: {error}", "correct the URL, or start or repair the storage")


def unwritable(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each output path that cannot be written or is a file instead of a folder."""
    for flag in (flag for flag in all_flags() if flag.spec.writes):
        path, folder = value_of(config, flag), flag.spec.writes == "folder"
        if path and isinstance(url := located(path), UrlPath):
            yield from _unreachable(flag.name, path, url if folder else url.parent)
            continue
        if path and not folder and Path(path).is_dir():
            yield Problem(flag.name, path, "is a folder", "use a file in it")
        elif path and (why := why_unwritable(Path(path) if folder else Path(path).parent)):
            remedy = f"use a {'folder' if folder else 'file in a folder'} that can be written"
            yield Problem(flag.name, path, why, remedy)
    load, save = config.checkpoint.load, config.checkpoint.save
    root = config.checkpoint.save_folder
    for path in (root / name for name in (METRICS_FILE, RUN_CONFIG, EVENTS, LATEST, LEASE)) if root is not None else ():
        if kind := _kind_of_no_file(path):
            rule = f"has a {kind} {path.name}, where the run writes a file"
            yield Problem("--save", save, rule, f"remove or rename that {kind}")
    if root is not None and os.path.lexists(kept := root / TOKENIZER_FOLDER) and not kept.is_dir():
        rule = f"has a {TOKENIZER_FOLDER} that is not a folder, where the run writes one"
        yield Problem("--save", save, rule, "remove or rename it")
    if load and os.path.isfile(load):
        yield Problem("--load", load, "is a file", "give the folder that contains the checkpoints, or one of them")
