"""The --save folder: a lease on it, whether all ranks see one folder, and files in it that stop or save a run.

Of two runs, or two halves of a cluster that cannot see each other, only one continues.

Rank 0 holds the file SAVE/.lease, written again every two seconds. A start that finds another's lease takes it over if
its process is gone from this machine, or, where the process is elsewhere or stopped, if it has not been renewed for a
while, which is judged by this host's clock alone. Else the start is refused. A run that finds that its lease was taken
over, as it had stood still, ends.

Checkpoints hold files of every rank, so that hosts cannot save one on disks of their own. Without the check at start, a
run on such hosts would train until its first save and then keep nothing.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.datasets.index_cache import folder_lock
from megatron.core.dist_checkpointing.latest_checkpoint import REMEDY
from megatron.core.dist_checkpointing.storage import CheckpointError, on_first_rank, ranks_without
from megatron.core.parallel_state import Axis
from megatron.extensions.resilience.flags import StopFileFlags
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime
from megatron.training.reliability.rank_store import Peer, Request
from megatron.training.reliability.watchdog import Watch, Watchdog

RENEWAL = 2.0
"""Seconds between two renewals."""

STALE = 12.0
"""Seconds without renewal after which a lease is free."""

DISK = 1.0
"""Seconds in which a disk that answers has written a lease."""


class LeaseError(RuntimeError):
    """Another run saves to the folder."""

    advice = (
        "end one of the two runs, or give them different folders; if hosts of one run have lost sight of each other, "
        "the other half continues: join it when they see each other again, as scripts/train_gpt_elastic.sh does"
    )


class LeaseWatch(Watch):
    """Holds the lease while a watchdog runs, on rank 0."""

    def __init__(self, config: RunConfig, watchdog: Watchdog) -> None:
        assert config.checkpoint.save is not None
        self._lease = SaveLease(Path(config.checkpoint.save), watchdog.failures.fail)
        self._outcome = watchdog.outcome
        watchdog.failures.at_exit.append(self._lease.release)

    def start(self) -> None:
        try:
            self._lease.acquire()
        except LeaseError:
            self._outcome.recorded = False
            raise

    def close(self) -> None:
        self._lease.release()


class SaveLease:
    """The lease of this process, rank 0 of its run. `lost` is called, on a thread, with a LeaseError if another run has
    taken it."""

    def __init__(self, folder: Path, lost: Callable[[LeaseError], object]) -> None:
        self._file, self._folder, self._lost = folder / ".lease", folder, lost
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._owner = asdict(Peer.here()) | {"token": os.urandom(8).hex(), "since": since}
        self._count = 0
        self._closed, self._writing = threading.Event(), threading.Lock()

    def acquire(self) -> None:
        """Takes the lease, after up to `STALE` seconds. Raises LeaseError if another run renews it."""
        limit, found = time.monotonic() + STALE, self._read()
        while found is not None and (state := self._state(found)) != "":
            if time.monotonic() > limit:
                if state not in ("T", "t", None):
                    raise LeaseError(self._of(found))
                break
            time.sleep(RENEWAL / 4)
            self._refuse_unless(found)
            found = self._read()
        self._folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self._folder):  # of two that start at once, the second one finds the lease of the first
            self._refuse_unless(found)
            self._write()
        self._refuse_unless(self._owner | {"renewals": self._count})
        threading.Thread(target=self._renew, name="save lease", daemon=True).start()

    def release(self) -> None:
        """Gives the lease back, if it still is this run's."""
        self._closed.set()
        ended = self._writing.acquire(timeout=DISK)  # a renewal under way would bring the file back
        with suppress(OSError):
            if (found := self._read()) is not None and found["token"] == self._owner["token"]:
                self._file.unlink()
        if ended:
            self._writing.release()

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL):
            other = None
            with suppress(OSError), self._writing:  # the disk is full or away: saves tell of that
                found = self._read()
                if found is not None and found["token"] != self._owner["token"]:
                    other = found
                elif not self._closed.is_set():
                    self._write()
            if other is not None:
                self._lost(LeaseError(f"{self._of(other)}, and has taken over: this run stood still"))
                return

    def _refuse_unless(self, expected: dict[str, Any] | None) -> None:
        """Raises LeaseError if there is a lease other than the expected one."""
        if (now := self._read()) is not None and now != expected:
            raise LeaseError(self._of(now))

    def _state(self, found: dict[str, Any]) -> str | None:
        """`Peer.state` of the process that holds it; None if that is not on this machine."""
        peer = Peer(found["host"], found["pid"], found["namespace"], found["started"])
        return peer.state() if peer.namespace and peer.namespace == self._owner["namespace"] else None

    def _of(self, found: dict[str, Any]) -> str:
        who = f"process {found['pid']} on {found['host']}, started {found.get('since', 'at an unknown time')}"
        return f"another run saves to {self._folder}: its rank 0 is {who}"

    def _read(self) -> dict[str, Any] | None:
        """The present lease; None where there is none, or none that can be read."""
        try:
            found = json.loads(self._file.read_text())
            return found if isinstance(found, dict) and "token" in found else None
        except (OSError, ValueError):
            return None

    def _write(self) -> None:
        self._count += 1
        new = self._file.with_name(f".lease-{self._owner['token']}")
        try:
            new.write_text(json.dumps(self._owner | {"renewals": self._count}))
            new.replace(self._file)
        finally:
            new.unlink(missing_ok=True)


PATIENCE = 10.0
"""Seconds in which a file of one host has to be seen on the others: network file systems cache folders for a while."""


class SharedFolder(Callback):
    """Checks the --save folder before the model is built."""

    def on_setup(self, runtime: Runtime) -> None:
        check_shared(Path(str(self.config.checkpoint.save)), "--save", runtime.state.world)


def check_shared(folder: Path, flag: str, world: Axis) -> None:
    """Raises ValueError, on every rank, if `folder` is not the same one for all ranks. Collective over `world`.

    The first rank creates the folder, and a file in it for the moment. If it cannot, nothing is checked: saves report
    that by themselves."""
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
            f"{flag} {folder} is not one folder for all ranks: what rank 0 writes there, {without} cannot see, and a "
            f"checkpoint has files of every rank; {REMEDY}"
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
            os.listdir(mark.parent)  # has a network file system look again
        time.sleep(0.1)
    return True


TRIGGERS = {"save": "save", "exit": "stop"}
"""Name of a file -> kind of the request that it makes."""


class StopFiles(Watch):
    """Rank 0 looks for the files. The kill switch stops the run as long as it exists."""

    def __init__(self, config: RunConfig, watchdog: Watchdog) -> None:
        options, self._requests = config.options(StopFileFlags), watchdog.requests
        self._files = {folder / name: kind for folder in options.folders(config) for name, kind in TRIGGERS.items()}
        self._kill_switch = Path(options.kill_switch_path) if options.kill_switch_path else None
        self._stuck = set[Path]()
        """Files that could not be removed."""

    def look(self) -> None:
        if not self._requests.pending:
            for request in self.due():
                self._requests.ask(request)

    def due(self) -> Iterator[Request]:
        """The requests that are due now. The files `save` and `exit` are removed when they are seen."""
        if self._kill_switch is not None and self._kill_switch.exists():
            yield Request("stop", f"--kill-switch-path {self._kill_switch} exists")
        for path, kind in self._files.items():
            try:
                if path.is_file():
                    path.unlink()
                    yield Request(kind, f"{path} was there")
            except OSError as error:  # the watchdog's thread has to live on: it also listens to signals
                if path not in self._stuck:
                    print(f"{path} is ignored, as it cannot be removed: {error}", file=sys.stderr, flush=True)
                self._stuck.add(path)
