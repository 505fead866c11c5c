"""Writers of metric records: `metrics.jsonl`, TensorBoard, Weights & Biases."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatron.core.dist_checkpointing.path_kind import METRICS_FILE
from megatron.training.config.run_config import LoggingConfig
from megatron.training.metrics.megatron_tags import Record, scalars

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSHED_SECONDS = 300
"""TensorBoard's thread flushes every 120 s; the next record learns of what it could not write."""

MOST_RECENT = 10_000
"""Records that are kept while TensorBoard's files cannot be written."""


class Sink(Protocol):
    """A destination of metric records."""

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


class JsonLinesSink:
    """Appends each record as one line of JSON. NaN and infinities are the strings "NaN", "Infinity" and "-Infinity",
    which `float` reads; null is a value that was not measured.

    A resumed run continues the file: records later than the checkpoint are dropped, so the file reads as if the run
    had never stopped. A new run renames an existing file instead of overwriting it. If a write fails, for example on
    a full disk, one warning is printed and the record is written together with a later one.
    """

    def __init__(self, path: Path, resume_iteration: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            if resume_iteration:
                self._truncate(path, resume_iteration)
            else:
                os.replace(path, self._free_name(path))
        self._file = path.open("ab", buffering=0)
        self._end = path.stat().st_size
        self._unwritten = b""
        self._failing = False

    @staticmethod
    def _free_name(path: Path) -> Path:
        """The first unused name of metrics.1.jsonl, metrics.2.jsonl, ..."""
        names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        return next(name for name in names if not name.exists())

    @staticmethod
    def _truncate(path: Path, iteration: int) -> None:
        kept = []
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                if json.loads(line)["iteration"] <= iteration:
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # damaged, or cut off when the run was killed
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        os.replace(temporary, path)

    def write(self, record: Record) -> None:
        self._unwritten += (json.dumps({key: _json_value(value) for key, value in record.items()}) + "\n").encode()
        try:
            if self._file.write(self._unwritten) < len(self._unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):  # of a device, which has no length
                self._file.truncate(self._end)  # remove a partly written line
            if not self._failing:
                print(f"cannot write metrics to {self._file.name} for now: {error}", file=sys.stderr, flush=True)
            self._failing = True
            return
        self._end += len(self._unwritten)
        self._unwritten, self._failing = b"", False

    def close(self) -> None:
        self._file.close()


def _json_value(value: Any) -> Any:
    """`value`, or the name of a number that JSON has not: NaN, Infinity or -Infinity. None is what was not measured."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class TensorBoardSink:
    """Writes the numbers of each record as TensorBoard scalars with Megatron-LM's tags, and the configuration as text.

    A resumed run hides what earlier ones wrote of later iterations. TensorBoard hides by step whatever the tag, so the
    curves over samples lose more than that: what was hidden is written anew from the `history` of records.

    If a write fails, for example on a full disk, one warning is printed, and a later file gets all records of the last
    `FLUSHED_SECONDS` and since. `metrics.jsonl` has every record."""

    def __init__(self, folder: str, resume_iteration: int, run_config: Record, history: Sequence[Record]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._open = folder, SummaryWriter
        self._recent: deque[tuple[float, Record]] = deque(maxlen=MOST_RECENT)
        self._failures, self._retry_at = 0, 0.0
        self._writer: SummaryWriter | None = SummaryWriter(folder, purge_step=resume_iteration + 1)
        rows = "".join(f"| {key} | {value} |\n" for key, value in sorted(run_config.items()))
        with self._surviving():
            self._writer.add_text("config", f"| field | value |\n| --- | --- |\n{rows}", resume_iteration)
            for record in history:
                for tag, value, step in scalars(record):
                    if tag.endswith(" vs samples") and step > resume_iteration:
                        self._writer.add_scalar(tag, value, step, walltime=record.get("time"))

    def write(self, record: Record) -> None:
        now, records = time.monotonic(), [record]
        self._recent.append((now, record))
        if self._writer is None and now < self._retry_at:
            return
        with self._surviving():
            if self._writer is None:
                self._writer, records = self._open(self._folder), [kept for _, kept in self._recent]
                self._recent = deque(((now, kept) for kept in records), MOST_RECENT)
            while self._recent[0][0] < now - FLUSHED_SECONDS:
                self._recent.popleft()
                self._failures = 0
            for each in records:
                for tag, value, step in scalars(each):
                    self._writer.add_scalar(tag, value, step, walltime=each.get("time"))

    def close(self) -> None:
        with self._surviving():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Gives the file up that cannot be written, for a time that doubles."""
        try:
            yield
        except OSError as error:
            if not self._failures:
                print(f"cannot write events to {self._folder} for now: {error}", file=sys.stderr, flush=True)
            broken, self._writer = self._writer, None
            self._retry_at = time.monotonic() + min(3600, 60 * 2**self._failures)
            self._failures += 1
            if broken is not None:
                with suppress(OSError):
                    broken.close()


class WandbSink:
    """Logs records to Weights & Biases with Megatron-LM's names. Raises ValueError if the package is not installed.

    Its files go into `folder`. A run that resumes goes on in the run of Weights & Biases whose id stands in `id_file`.
    """

    def __init__(
        self, config: LoggingConfig, run_config: Record, folder: str, id_file: Path, resume_iteration: int
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--wandb-project {config.wandb_project} needs the wandb package: pip install wandb"
            ) from error
        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            entity=config.wandb_entity,
            dir=folder,
            config=run_config,
            id=id_file.read_text().strip() if resume_iteration and id_file.exists() else None,
            resume="allow",
        )
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(f"{self._run.id}\n")

    def write(self, record: Record) -> None:
        found = {tag: value for tag, value, _ in scalars(record) if not tag.endswith(" vs samples")}
        self._run.log(found, step=record["iteration"])

    def close(self) -> None:
        self._run.finish()


def open_sinks(config: LoggingConfig, save: str | None, resume_iteration: int, run_config: Record) -> list[Sink]:
    """Opens every sink that the configuration asks for. Call it on one rank only."""
    sinks: list[Sink] = []
    path = config.metrics_file or str(Path(save or ".") / METRICS_FILE)
    sinks.append(JsonLinesSink(Path(path), resume_iteration))
    if config.tensorboard_dir:
        history = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
        sinks.append(TensorBoardSink(config.tensorboard_dir, resume_iteration, run_config, list(history)))
    if config.wandb_project:
        folder = config.wandb_save_dir or os.environ.get("WANDB_DIR") or save or tempfile.mkdtemp(prefix="wandb-")
        beside = Path(path).parent if save or config.metrics_file else Path(folder)
        sinks.append(WandbSink(config, run_config, folder, beside / "wandb_run_id.txt", resume_iteration))
    return sinks
