"""Which files an input names: paths, globs, folders and URLs."""

from __future__ import annotations

import glob
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron.extensions.text_data.streams import COMPRESSIONS, remote

logger = logging.getLogger(__name__)

SHOWN = 5
"""Files that a line names."""

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "text",
    ".text": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
"""Suffix -> format, a key of `megatron.extensions.text_data.formats.READERS`."""


@dataclass(frozen=True)
class TextFile:
    """A file of documents."""

    path: str
    """Path or URL."""

    format: str | None
    """None where the name says nothing."""

    compression: str
    """A key of `COMPRESSIONS`, or ""."""

    size: int
    """Bytes as stored."""

    modified: str
    """Changes when the file does: its time of modification, or what a remote store calls its state."""


def by_name(path: str) -> tuple[str | None, str]:
    """Format and compression that the name of a file states: "a.jsonl.gz" is ("jsonl", ".gz")."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(path).suffixes[-2:]]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSIONS else ""
    return (FORMATS.get(suffixes[-1]) if suffixes else None), compression


def is_text(path: str) -> bool:
    """Whether a path is text by its name, or a folder that has such files, hidden ones excepted."""
    if not os.path.isdir(path):
        return by_name(path)[0] is not None
    names = (name for _, _, files in os.walk(path) for name in files)
    return any(by_name(name)[0] is not None for name in names if not name.startswith("."))


def find_inputs(patterns: Sequence[str], flag: str = "--input") -> list[TextFile]:
    """Files of paths, globs, folders and URLs: in the order given, those of a glob or a folder sorted, none twice.

    A folder is every file of a known format below it, hidden ones excepted. Raises ValueError with every pattern that
    names no file.
    """
    found: dict[str, TextFile] = {}
    problems = []
    for pattern in patterns:
        try:
            files = list(_remote_files(pattern) if "://" in pattern else _local_files(pattern))
        except Exception as error:  # the libraries behind URLs raise errors of their own
            if "://" not in pattern and not isinstance(error, (ValueError, OSError)):
                raise
            problems.append(f"{flag} {pattern}: {str(error).removeprefix(f'{pattern}: ')}")
            continue
        if not files:
            where = "" if "://" in pattern else f"; the path is taken from {Path.cwd()}"
            problems.append(f"{flag} {pattern}: there is no such file{where}")
        for file in files:
            found.setdefault(file.path, file)
    if problems:
        raise ValueError("\n".join(problems))
    return list(found.values())


def _local_files(pattern: str) -> Iterator[TextFile]:
    if os.path.isdir(pattern):
        paths = [os.path.join(folder, name) for folder, _, names in os.walk(pattern) for name in names]
        kept = sorted(_known(paths, pattern))
    else:
        matches = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        kept = sorted(match for match in matches if not os.path.isdir(match))
    for path in kept:
        state = os.stat(path)
        yield TextFile(path, *by_name(path), state.st_size, str(state.st_mtime_ns))


def _remote_files(url: str) -> Iterator[TextFile]:
    filesystem, inside = remote(url)
    if any(letter in inside for letter in "*?["):
        paths = [path for path in filesystem.glob(inside) if not filesystem.isdir(path)]
    elif filesystem.isdir(inside):
        paths = list(_known(filesystem.find(inside), url))
    else:
        paths = [inside] if filesystem.exists(inside) else []
    for path in sorted(paths):
        state = filesystem.info(path)
        modified = next((str(state[key]) for key in ("ETag", "etag", "mtime", "LastModified") if key in state), "")
        yield TextFile(filesystem.unstrip_protocol(path), *by_name(path), int(state.get("size") or 0), modified)


def _known(paths: Sequence[str], folder: str) -> Iterator[str]:
    """Those of a known format. Raises ValueError if there are none."""
    inside = [path.removeprefix(folder) for path in paths]
    shown = [path for path, place in zip(paths, inside, strict=True) if "/." not in f"/{place}"]
    known = [path for path in shown if by_name(path)[0] is not None]
    if not known:
        suffixes = ", ".join(FORMATS)
        raise ValueError(f"the folder has no file of documents ({suffixes}); name its files, as '{folder}/*'")
    others = sorted(set(shown) - set(known))
    if others:
        files = "1 file" if len(others) == 1 else f"{len(others)} files"
        some = ", ".join(map(os.path.basename, others[:SHOWN])) + (", ..." if len(others) > SHOWN else "")
        logger.warning("%s: %s of no known format left out: %s", folder, files, some)
    yield from known
