"""Sinks to which metric records are written: the file `metrics.jsonl`, and sinks that extensions register in
`SINKS`."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import StringIO
from itertools import count
from pathlib import Path, PurePath
from typing import Any, Protocol

from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.core.dist_checkpointing.path_kind import METRICS_FILE
from megatron.core.registry import Registry
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.visible_text import visible

Record = dict[str, Any]


class Sink(Protocol):
    """Destination of metric records."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class SinkClass(Protocol):
    """Function that opens a sink. The function is called on the first rank. `iteration` is the iteration after which
    the run starts."""

    def __call__(self, config: RunConfig, iteration: int) -> Sink: ...


@dataclass(frozen=True)
class SinkFacts:
    """Properties of a sink that are known before it is imported."""

    when: Callable[[RunConfig], bool]
    """Function that returns True if a run with this configuration uses the sink."""


SINKS = Registry("sink", SinkFacts, protocol=SinkClass, makes=Sink)
"""Registered sinks, which receive records in addition to `metrics.jsonl`:

    @SINKS.register("losses", when=lambda config: config.options(LossFile).loss_file is not None)
    class LossSink:
        def write(self, record): ...
"""


class JsonLinesSink:
    """Sink that appends each record as one line of JSON. NaN and infinities are written as the strings "NaN",
    "Infinity" and "-Infinity", which `float` parses. null means that a value was not measured.

    A resumed run appends to the existing file. Records later than the checkpoint are dropped, so that the file reads as
    if the run had never stopped. A record of the checkpoint's iteration that the file already contains is not written
    again. For example, starting a finished run again repeats its test record. If any line except the last one is
    damaged, the sink copies the file before it changes the file. A new run renames an existing file instead of
    overwriting it. If a write fails, for example on a full disk, one warning is printed, and the record is kept and
    written together with a later record.

    If the file is deleted, renamed or replaced during the run, further records go to a file at the original path.
    The sink calls `check` before it creates that file. `check` raises OSError if the run must not create files in the
    folder.
    """

    def __init__(self, path: Path, resume_iteration: int, check: Callable[[], None] = lambda: None) -> None:
        self._path, self._check = path, check
        self._known: set[bytes] = set()
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_iteration:
                self._truncate(path, resume_iteration)
            else:
                os.replace(path, self._free_name(path))
        self._file = path.open("ab", buffering=0)
        self._opened = os.fstat(self._file.fileno())
        self._end = self._opened.st_size
        self._unwritten = b""
        self._failing = False

    @staticmethod
    def _free_name(path: Path) -> Path:
        """Return the first unused name among metrics.1.jsonl, metrics.2.jsonl, ..."""
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        return next(name for name in names if not name.exists())

    def _truncate(self, path: Path, iteration: int) -> None:
        """Drop the records after `iteration`. Each start of a run reads the file line by line, because the file may be
        large."""
        kept, temporary = RecordsUntil(iteration), path.with_name(path.name + ".tmp")
        with path.open(encoding="utf-8", errors="replace") as old, temporary.open("w", encoding="utf-8") as new:
            new.writelines(kept.of(old))
        self._known = kept.last
        if kept.damaged:
            copy = self._free_name(path)
            shutil.copyfile(path, copy)
            told = f"{path}: lines that are not metric records are left out: {kept.damaged}; "
            print(visible(f"{told}{copy} is a copy of the original file"), file=sys.stderr, flush=True)
        os.replace(temporary, path)

    def write(self, record: Record) -> None:
        if _without_time(record) not in self._known:
            self._unwritten += _json_line(record)
            self._write_pending()

    def _write_pending(self) -> None:
        try:
            self._follow_path()
            self._append(self._unwritten)
        except OSError as error:
            if not self._failing:
                print(visible(f"cannot write metrics to {self._path} for now: {error}"), file=sys.stderr, flush=True)
            self._failing = True
            return
        self._end += len(self._unwritten)
        self._unwritten, self._failing = b"", False

    def _follow_path(self) -> None:
        """Reopen the file if its path now refers to another file or to no file. Raises OSError."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._opened, self._path.stat()):
                return
        self._check()
        file = self._path.open("ab", buffering=0)
        self._file.close()
        self._file, self._opened = file, os.fstat(file.fileno())
        self._end = self._opened.st_size
        print(f"{self._path} was deleted or replaced: records continue in a new file", file=sys.stderr, flush=True)

    def _append(self, lines: bytes) -> None:
        """Write all of `lines` or nothing. Raises OSError."""
        try:
            if self._file.write(lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with suppress(OSError):  # raised for devices, which cannot be truncated
                self._file.truncate(self._end)  # Remove a partly written line.
            raise

    def close(self) -> None:
        if self._unwritten and not self._file.closed:
            self._write_pending()
        self._file.close()


class StoredLinesSink:
    """Sink that appends records to a JSON lines file in remote storage, in the same format as `JsonLinesSink`."""

    def __init__(self, path: PurePath, resume_iteration: int) -> None:
        self._storage, self._path = storage_of(path), path
        self._unwritten, self._failing = b"", False
        old = self._storage.read(path) if self._storage.size(path) else b""
        kept, found = records_until(old.decode(errors="replace"), resume_iteration)
        self._known = found.last if resume_iteration else set()
        if old and (found.damaged or not resume_iteration):
            names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            self._storage.write(next(name for name in names if not self._storage.exists(name)), old)
        self._storage.write(path, "".join(kept if resume_iteration else []).encode())

    def write(self, record: Record) -> None:
        if _without_time(record) in self._known:
            return
        self._unwritten += _json_line(record)
        try:
            self._storage.append(self._path, self._unwritten)
        except OSError as error:
            if not self._failing:
                print(visible(f"cannot write metrics to {self._path} for now: {error}"), file=sys.stderr, flush=True)
            self._failing = True
            return
        self._unwritten, self._failing = b"", False

    def close(self) -> None:
        if self._unwritten:
            with suppress(OSError):
                self._storage.append(self._path, self._unwritten)
        self._unwritten = b""


class RecordsUntil:
    """Filter for lines of a metrics file that keeps the records up to `iteration`."""

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration
        self.damaged = 0
        """Number of lines that are not records."""

        self.last = set[bytes]()
        """Records of iteration `iteration`, the last iteration to keep, without their times (`_without_time`)."""

    def of(self, lines: Iterable[str]) -> Iterator[str]:
        """Yield the lines to keep. If the last line has no line break, the process that wrote it was killed, and the
        line is dropped."""
        for line in filter(str.strip, lines):
            if line.lstrip().startswith("{") and not line.endswith("\n"):
                continue
            try:
                record = parse_json(line)
                number = record["iteration"]
                kept = number <= self.iteration
            except (ValueError, KeyError, TypeError):
                self.damaged += 1
                continue
            if kept:
                yield line
            if number == self.iteration:
                self.last.add(_without_time(record))


def records_until(text: str, iteration: int) -> tuple[list[str], RecordsUntil]:
    """Select the lines of a metrics file that are records up to `iteration`. Return the selected lines, and the
    `RecordsUntil` object that selected them."""
    found = RecordsUntil(iteration)
    return list(found.of(StringIO(text))), found


def _without_time(record: Record) -> bytes:
    return _json_line({key: value for key, value in record.items() if key != "time"})


def _json_line(record: Record) -> bytes:
    return (json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n").encode()


def _json_value(value: object) -> object:
    """Return `value` in a form that JSON can represent. NaN and infinities become the strings "NaN", "Infinity" and
    "-Infinity". None means that the value was not measured."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def metrics_file(config: RunConfig) -> PurePath:
    """Return the path of --metrics-file. The default is metrics.jsonl in the --save folder, or in the current folder
    without --save."""
    return located(config.logging.metrics_file or (config.checkpoint.save_root or Path()) / METRICS_FILE)


def open_sinks(config: RunConfig, iteration: int, check: Callable[[], None] = lambda: None) -> list[Sink]:
    """Open every sink that the configuration enables. `iteration` is the last iteration before the start of the run.
    Call this function on one rank only. `check` is passed to `JsonLinesSink`."""
    wanted, file = SINKS.wanted(config), metrics_file(config)
    lines = JsonLinesSink(file, iteration, check) if isinstance(file, Path) else StoredLinesSink(file, iteration)
    return [lines, *(SINKS[name](config, iteration) for name in wanted)]
