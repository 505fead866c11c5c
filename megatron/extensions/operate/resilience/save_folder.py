"""Checks of the --save folder. Before training, verify that all ranks see the same folder. During training, look for
trigger files that stop the run or request a checkpoint.

Every rank writes files of a checkpoint, so hosts with separate disks cannot save a complete checkpoint. Without this
check before training, a run on hosts with separate disks would train until its first save and then fail.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron.core.dist_checkpointing.storage import CheckpointError, on_first_rank, ranks_without
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.resilience.flags import StopFileFlags
from megatron.training.checkpoints.loading import REMEDY
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime
from megatron.training.reliability.rank_store import Request
from megatron.training.reliability.visible_text import visible
from megatron.training.reliability.watchdog import Watch, Watchdog

PATIENCE = 10.0
"""Maximum time in seconds to wait until a file that one host has written becomes visible on the other hosts. Network
file systems cache the content of folders, so other hosts see new files late."""


class SharedFolder(Callback):
    """Callback that checks the --save folder before the model is built."""

    def on_setup(self, runtime: Runtime) -> None:
        check_shared(Path(str(self.config.checkpoint.save)), "--save", runtime.state.world)


def check_shared(folder: Path, flag: str, world: Axis) -> None:
    """Raise ValueError on every rank if `folder` is not the same folder for all ranks. Collective over `world`.

    The first rank creates a temporary file in the folder, and all other ranks look for it. If the first rank cannot
    create the file, this function checks nothing, because a later save reports the error."""
    if world.size == 1:
        return
    try:
        mark = on_first_rank(lambda: _mark(folder), world)
    except CheckpointError:
        return
    without = ranks_without(_sees(folder / mark), world)
    on_first_rank(lambda: _forget(folder / mark), world)
    if without:
        raise ValueError(
            f"{flag} {folder} is not the same folder for all ranks: {without} cannot see a file that rank 0 has "
            f"written there, but every rank writes files of a checkpoint; {REMEDY}"
        )


def _mark(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".seen-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name


def _forget(mark: Path) -> None:
    with suppress(OSError):
        mark.unlink()


def _sees(mark: Path) -> bool:
    limit = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > limit:
            return False
        with suppress(OSError):
            os.listdir(mark.parent)  # listing the folder causes a network file system to refresh its cache
        time.sleep(0.1)
    return True


TRIGGERS = {"save": "save", "exit": "stop"}
"""Maps the name of each trigger file to the request that it makes: to save a checkpoint, or to save and stop."""


class StopFiles(Watch):
    """Part of rank 0's watchdog that looks for trigger files and for the kill switch file. The kill switch file is not
    removed. After a restart, the run stops again until a user deletes the kill switch file."""

    def __init__(self, config: RunConfig, watchdog: Watchdog) -> None:
        options, self._requests = config.options(StopFileFlags), watchdog.requests
        self._files = {folder / name: kind for folder in options.folders(config) for name, kind in TRIGGERS.items()}
        self._kill_switch = Path(options.kill_switch_path) if options.kill_switch_path else None
        self._stuck = set[Path]()
        """Paths of trigger files that could not be removed, and are therefore ignored."""

    def look(self) -> None:
        if not self._requests.pending:
            for request in self.due():
                self._requests.ask(request)

    def due(self) -> Iterator[Request]:
        """Yield a request for each trigger file that exists, and for the kill switch. Trigger files are deleted when
        they are found."""
        if self._kill_switch is not None and self._kill_switch.exists() and not self._kill_switch.is_dir():
            yield Request("stop", f"--kill-switch-path {self._kill_switch} exists")
        for path, kind in self._files.items():
            try:
                if path.is_file():
                    path.unlink()
                    yield Request(kind, f"{path} was there")
            except OSError as error:  # do not raise, because this thread also handles signals
                if path not in self._stuck:
                    print(visible(f"{path} is ignored: it cannot be removed: {error}"), file=sys.stderr, flush=True)
                self._stuck.add(path)
