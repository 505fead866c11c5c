"""Two-tier checkpoints (--save-local): checkpoints are saved on a fast local file system and uploaded to --save in the
background.

All checkpoints of the run are saved to the local folder, which keeps only the newest checkpoints. A thread of the first
rank uploads the checkpoints that --save-interval requests, and the last checkpoint of the run. A resumed run loads the
newest complete checkpoint from either location.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePath

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.checkpoint_writer import CheckpointWriter
from megatron.core.dist_checkpointing.file_storage import LOCAL, located
from megatron.core.dist_checkpointing.path_kind import (
    checkpoint_folder,
    latest_text,
    read_latest,
    saved_folders,
)
from megatron.core.dist_checkpointing.storage import on_first_rank
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.object_storage.flags import LocalSaveFlags
from megatron.extensions.operate.object_storage.upload import upload
from megatron.training.checkpoints.loading import verify
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Exporter, Log, Meter, RunView, Task
from megatron.training.progress import BegunRun, Progress
from megatron.training.reliability.run_status import record_event
from megatron.training.run import TrainingRun
from megatron.training.tasks import save

UPLOADED = "uploaded"
"""Name of a file in the local folder. The file contains the iteration of the last uploaded checkpoint."""

ATTEMPTS, PAUSE = 3, 2.0


def local_root(folder: str, save: str) -> Path:
    """Return the folder for a run's local checkpoints. The name of the folder depends on --save, because several runs
    may use the same --save-local. A trailing slash in --save is ignored."""
    place = str(located(save))
    return Path(folder) / f"{PurePath(place).name}-{blake2b(place.encode(), digest_size=6).hexdigest()}"


class Uploads:
    """Upload of complete checkpoints from the local folder to --save. One rank uploads one checkpoint at a time. If
    several checkpoints are waiting, only the newest one is uploaded."""

    doing = "uploading the last checkpoint"

    def __init__(self, root: Path, interval: int | None, run: TrainingRun, others: Sequence[Exporter]) -> None:
        self.root, self.interval = root, interval
        self.others = others
        self._save, self._held = run.config.checkpoint.save_root, run.saver.writer.held if run.saver.writer else []
        self._check, self._callbacks = run.runtime.watchdog.check_save_folder, run.callbacks
        self._own_latest = {latest_text(self._save)} if self._save is not None else set[str]()
        self._newest: int | None = None
        self._uploaded = 0
        self._waiting: int | None = None
        self._thread: threading.Thread | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, iteration: int, checkpoint: PurePath) -> None:
        folder = checkpoint_folder(self.root, iteration)
        self._newest = iteration
        if not self.interval or iteration % self.interval == 0:
            self.want(iteration)
        for other in self.others:
            other.add(iteration, folder)

    def want(self, iteration: int) -> None:
        """Queue a local checkpoint for upload. An older checkpoint that is still waiting is not uploaded."""
        if self._waiting is not None:
            self._held.remove(checkpoint_folder(self.root, self._waiting))
            self._lines.put(f"checkpoint of iteration {self._waiting} is not uploaded: {iteration} is newer")
        self._waiting = iteration
        self._held.append(checkpoint_folder(self.root, iteration))

    def poll(self, wait: bool = False) -> list[str]:
        if wait and self._newest is not None and self._newest > max(self._uploaded, self._waiting or 0):
            self.want(self._newest)
        while self._waiting is not None or self._thread is not None:
            if self._thread is None:
                iteration, self._waiting = self._waiting, None
                assert iteration is not None
                self._uploaded = iteration
                self._thread = threading.Thread(target=self._upload, args=(iteration,), name="uploads", daemon=True)
                self._thread.start()
            if not wait and self._thread.is_alive():
                break
            self._thread.join()
            self._thread = None
        found = [line for other in self.others for line in other.poll(wait)]
        while not self._lines.empty():
            found.append(self._lines.get())
        return found

    def abandon(self) -> list[str]:
        """Abandon pending exports, such as exports to Hugging Face, and return the log lines about them. The upload of
        the newest checkpoint is not abandoned, because the local disk may be lost when the job ends."""
        return [line for other in self.others for line in other.abandon()]

    def _upload(self, iteration: int) -> None:
        assert self._save is not None
        folder, began = checkpoint_folder(self.root, iteration), time.monotonic()
        try:
            for left in range(ATTEMPTS - 1, -1, -1):
                try:
                    nbytes = upload(folder, self._save, iteration, partial(self._check_writable, iteration))
                    break
                except (OSError, ValueError) as error:
                    then = f"{left} more attempts" if left else f"no more attempts; the checkpoint is in {folder}"
                    self._lines.put(f"checkpoint of iteration {iteration} was not uploaded: {error}; {then}")
                    record_event(str(self._save), "upload", iteration=iteration, error=str(error))
                    if not left:
                        return
                    time.sleep(PAUSE)
            seconds = time.monotonic() - began
            self._own_latest.add(str(iteration))
            LOCAL.write(self.root / UPLOADED, str(iteration).encode())
            self._lines.put(f"uploaded checkpoint of iteration {iteration} to {self._save} in {seconds:.2f} s")
            record_event(str(self._save), "upload", iteration=iteration, seconds=round(seconds, 3), bytes=nbytes)
            self._clean(self._save, iteration)
        except OSError as error:
            self._lines.put(f"checkpoint of iteration {iteration} is uploaded, but an error followed: {error}")
        finally:
            with suppress(ValueError):
                self._held.remove(folder)

    def _check_writable(self, iteration: int) -> None:
        assert self._save is not None
        self._check()
        latest = latest_text(self._save)
        if latest.isdigit() and latest not in self._own_latest and int(latest) > iteration:
            raise OSError(
                f"{self._save} contains a checkpoint of iteration {latest} of another run; end one of the two runs"
            )

    def _clean(self, root: PurePath, newest: int) -> None:
        for callback in self._callbacks:
            if not isinstance(callback, TwoTiers):
                callback.clean_checkpoints(root, newest, list(self._held))


class TwoTiers(Callback):
    """Callback that saves checkpoints to the local folder instead of --save, and loads from either location."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.options = config.options(LocalSaveFlags)
        assert self.options.save_local is not None and config.checkpoint.save is not None
        self.root = local_root(self.options.save_local, config.checkpoint.save)
        self._resumed: int | None = None
        self._uploads: Uploads | None = None

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        options, world = begun.config.checkpoint, begun.state.world
        self._check_shared(world)
        resumes = options.load_root == options.save_root and not options.anew and options.load_optim
        folders, line = on_first_rank(lambda: self._newer(resumes), world)
        if line:
            say(f" {line}")
        for folder in folders:
            if problems := verify(folder, world):
                say(f" skipped local checkpoint {folder}: {'; '.join(problems)}")
                continue
            progress = begun.resume_from(str(folder), say, data, f", newer than those in {options.load}")
            self._resumed = progress.iteration
            return progress
        return None

    def meters(self, run: TrainingRun) -> Sequence[Meter]:
        """Configure the run to save to the local folder. Collective."""
        saver = run.saver
        old = saver.writer
        assert old is not None
        self._uploads = Uploads(self.root, self.config.checkpoint.save_interval, run, saver.exporters)
        writer = CheckpointWriter(
            self.root, run.runtime.state.world, background=old.background, cleanups=[self._keep_newest]
        )
        writer.held, writer.check = old.held, old.check
        saver.writer, saver.exporters = writer, [self._uploads]
        run.lines.place = str(self.root)
        return ()

    def on_start(self, run: RunView) -> None:
        assert isinstance(run, TrainingRun)
        if self._resumed is not None and self._uploads is not None and run.runtime.state.world.first:
            self._uploads.want(self._resumed)

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        every = self.config.checkpoint.save_interval

        def save_between() -> None:
            if not every or run.progress.iteration % every:
                save(run)

        return (Task("local save", self.options.save_local_interval, save_between),)

    def _check_shared(self, world: Axis) -> None:
        """Raise ValueError on every rank if some ranks do not see the same folder as rank 0. Collective."""
        token = f".shared-{os.urandom(8).hex()}"

        def leave() -> str:
            self.root.mkdir(parents=True, exist_ok=True)
            (self.root / token).touch()
            return token

        there = self.root / on_first_rank(leave, world)
        seen = gather_objects(there.exists(), world)
        if world.first:
            there.unlink(missing_ok=True)
        if not all(seen):
            rule = (
                f"is not the same folder for all ranks: {seen.count(False)} of {world.size} cannot see rank 0's folder"
            )
            remedy = "use a folder on a file system that all hosts share, or remove the flag"
            raise ValueError(str(Problem("--save-local", self.options.save_local, rule, remedy)))

    def _newer(self, resumes: bool) -> tuple[list[Path], str]:
        """Return the local checkpoints that are newer than the checkpoints in --save, newest first. The second result
        is a log line that explains why local checkpoints cannot be used; empty if they can be used. Local checkpoints
        of training that this run does not continue are moved to a folder with the suffix `.old`."""
        root = self.config.checkpoint.save_root
        assert root is not None
        try:
            stored, uploaded = read_latest(root) or 0, int(LOCAL.content(self.root / UPLOADED) or 0)
            latest = read_latest(self.root) or 0
        except ValueError as error:
            return [], f"local checkpoints are not used: {error}"
        saved = saved_folders(self.root)
        if resumes and stored >= uploaded:
            return [saved[number] for number in sorted(saved, reverse=True) if stored < number <= latest], ""
        if not saved:
            return [], ""
        aside = self.root.with_name(f"{self.root.name}.old")
        with suppress(FileNotFoundError):
            LOCAL.remove(aside)
        os.rename(self.root, aside)
        self.root.mkdir()
        why = f"--load was set back to iteration {stored}" if resumes else "this run does not resume from --save"
        return [], f"local checkpoints up to iteration {max(saved)} are moved to {aside}: {why}"

    def _keep_newest(self, root: PurePath, newest: int, held: Collection[PurePath]) -> None:
        own = [number for number in sorted(saved_folders(root)) if number <= newest]
        for number in own[: -self.options.save_local_keep]:
            if (folder := checkpoint_folder(root, number)) not in held:
                LOCAL.withdraw(folder)
