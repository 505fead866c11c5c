"""TensorBoard and Weights & Biases sinks for metric records."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.extensions.observe.logs.flags import LogsConfig
from megatron.extensions.observe.logs.megatron_format import scalars
from megatron.training.config.flags import flat_values
from megatron.training.config.run_config import RunConfig
from megatron.training.metrics.sinks import Record, metrics_file
from megatron.training.reliability.visible_text import visible

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSHED_SECONDS = 300
"""Maximum age in seconds of records that are written again after a failed write. TensorBoard's thread flushes every 120
s, so a failure is detected only when a later record is written."""

MOST_RECENT = 10_000
"""Maximum number of records that are kept in memory while TensorBoard's files cannot be written."""


class TensorBoardSink:
    """TensorBoard sink. The numbers of each record are written as scalars with Megatron-LM's tags. The configuration is
    written as text.

    When a run resumes, TensorBoard hides the old values of iterations that run again. TensorBoard hides every old value
    whose step number is at least the first repeated iteration, regardless of the tag. Curves over samples use the
    number of samples as the step number, so TensorBoard also hides values of these curves that must remain visible. The
    sink writes these values again from `metrics.jsonl`.

    If a write fails, for example on a full disk, one warning is printed. When writing succeeds again, the sink starts a
    new file, which contains all records since `FLUSHED_SECONDS` before the failure. `metrics.jsonl` contains every
    record.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder, file = str(config.options(LogsConfig).tensorboard_dir), metrics_file(config)
        history = map(parse_json, storage_of(file).read(file).decode().splitlines())
        self._folder, self._open = folder, SummaryWriter
        self._recent: deque[tuple[float, Record]] = deque(maxlen=MOST_RECENT)
        self._failures, self._retry_at = 0, 0.0
        self._writer: SummaryWriter | None = SummaryWriter(folder, purge_step=iteration + 1)
        rows = "".join(f"| {key} | {value} |\n" for key, value in sorted(flat_values(config).items()))
        with self._surviving():
            self._writer.add_text("config", f"| field | value |\n| --- | --- |\n{rows}", iteration)
            for record in history:
                for tag, value, step in scalars(record):
                    if tag.endswith(" vs samples") and step > iteration:
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
        """Suspend writing for one minute after an error. Each further error doubles the pause, up to one hour."""
        try:
            yield
        except OSError as error:
            if not self._failures:
                print(visible(f"cannot write events to {self._folder} for now: {error}"), file=sys.stderr, flush=True)
            broken, self._writer = self._writer, None
            self._retry_at = time.monotonic() + min(3600, 60 * 2**self._failures)
            self._failures += 1
            if broken is not None:
                with suppress(OSError):
                    broken.close()


class WandbSink:
    """Weights & Biases sink that logs values under Megatron-LM's names.

    A resumed run continues the Weights & Biases run whose id is in `wandb_run_id.txt`. Raises ValueError if the package
    is not installed, or if the run cannot be started.
    """

    def __init__(self, config: RunConfig, iteration: int) -> None:
        own, save = config.options(LogsConfig), config.checkpoint.save_folder
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--wandb-project {own.wandb_project} needs the wandb package: pip install wandb"
            ) from error
        folder = str(own.wandb_save_dir or os.environ.get("WANDB_DIR") or save or tempfile.mkdtemp(prefix="wandb-"))
        file, is_given = metrics_file(config), bool(save or config.logging.metrics_file)
        beside = file.parent if is_given and isinstance(file, Path) else Path(folder)
        id_file = beside / "wandb_run_id.txt"
        try:
            self._run = wandb.init(
                project=own.wandb_project,
                name=own.wandb_exp_name,
                entity=own.wandb_entity,
                dir=folder,
                config=flat_values(config),
                id=id_file.read_text().strip() if iteration and id_file.exists() else None,
                resume="allow",
            )
        except wandb.Error as error:  # for example, no login, no network, or an unknown team
            rule = f"Weights & Biases cannot be used ({' '.join(str(error).split())})"
            remedy = "run wandb login, set WANDB_API_KEY, or keep the run's files locally with WANDB_MODE=offline"
            raise ValueError(f"--wandb-project {own.wandb_project}: {rule}; {remedy}") from error
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(f"{self._run.id}\n")

    def write(self, record: Record) -> None:
        found = {tag: value for tag, value, _ in scalars(record) if not tag.endswith(" vs samples")}
        self._run.log(found, step=record["iteration"])

    def close(self) -> None:
        self._run.finish()
