"""Lease on the --save folder. If two runs, or two halves of a split cluster, save to the same folder, only one of them
continues.

Rank 0 holds the lease, which is the file SAVE/.lease, and rewrites the file every two seconds. A new run may find the
lease of another run. If the process that holds this lease ran on the same machine and no longer exists, the new run
takes over the lease. If that process is on another machine or is stopped, the new run takes over the lease after
`STALE` seconds without a renewal. The new run measures this time with its own clock. If the process that holds the
lease runs on this machine, or renews the lease from another machine, the new run ends with an error.

A run ends if another run takes over the lease, or if the lease disappears from the folder. A lease may disappear
because another run took it over, finished and released it while this run was suspended. The run also checks the lease
before each save.

If the folder is deleted or renamed, the run reports this and continues, because the state in memory is then the only
copy. The next save creates the folder again. If the disk with the folder is unmounted, saves fail until the disk is
mounted again.

In object storage, the lease is an object. A run renews the lease by replacing the object, but only if no other run has
changed the object. If the storage supports conditional writes, two runs cannot hold the lease at the same time.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import Any

from megatron.core.config.json_text import parse_json
from megatron.core.datasets.index_cache import folder_lock
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.path_kind import LEASE
from megatron.training.config.run_config import RunConfig
from megatron.training.reliability.rank_store import Peer
from megatron.training.reliability.watchdog import Watch, Watchdog

GONE = (
    "is gone: it was deleted, renamed or unmounted during the run. Training continues, and the next save creates "
    "an empty folder in its place; restore the folder before that to keep its content"
)
UNMOUNTED = (
    "is on a different file system than at the start of the run: its disk was unmounted. Training continues; saves "
    "fail until it is mounted again"
)

TAKEN = "is gone: another run has taken over while this one was suspended and has finished, or the file was deleted"

LeaseText = dict[str, Any]
"""Content of the lease: the fields of `Peer`, a random token and the start time of the run that holds the lease, and
the number of renewals."""

RENEWAL = 2.0
"""Number of seconds between two renewals of a lease."""

STALE = 12.0
"""Number of seconds without a renewal after which another run may take over a lease."""

DISK = 1.0
"""Maximum time in seconds to wait for the disk to write a lease."""


class LeaseError(RuntimeError):
    """Raised if another run saves to the folder or has saved to the folder since this run started."""

    advice = (
        "end one of the two runs, or save them to different folders; if the network has split the hosts of one run, "
        "the other half continues: let these hosts rejoin it later, as scripts/train_gpt_elastic.sh does"
    )


class LostLeaseError(LeaseError):
    """Raised if the lease of this run has disappeared from the folder."""

    advice = "start the same command again: it resumes from the latest checkpoint in the folder, whichever run saved it"


class LeaseWatch(Watch):
    """Part of rank 0's watchdog that holds the lease on the --save folder."""

    def __init__(self, config: RunConfig, watchdog: Watchdog) -> None:
        root = config.checkpoint.save_root
        assert root is not None
        lost = watchdog.failures.fail
        self._lease = SaveLease(root, lost) if isinstance(root, Path) else StoredLease(root, lost)
        self._outcome = watchdog.outcome
        watchdog.failures.at_exit.append(self._lease.release)
        watchdog.save_guards.append(self._lease.check)

    def start(self) -> None:
        try:
            self._lease.acquire()
        except LeaseError:
            self._outcome.recorded = False
            raise

    def close(self) -> None:
        self._lease.release()


class Lease(ABC):
    """Lease on a --save folder, held by rank 0 of a run. If another run takes over the lease or the lease disappears,
    `lost` is called with a LeaseError, in a separate thread."""

    def __init__(self, folder: PurePath, lost: Callable[[LeaseError], object]) -> None:
        self._shown = folder
        self._lost = lost
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        self._owner = asdict(Peer.here()) | {"token": os.urandom(8).hex(), "since": since}
        self._count = 0
        self._closed, self._writing = threading.Event(), threading.Lock()

    @abstractmethod
    def _read(self) -> LeaseText | None:
        """Return the current lease; None if there is no lease or if the lease cannot be read."""

    @abstractmethod
    def _take(self, found: LeaseText | None) -> None:
        """Replace the lease `found` with the first lease of this run. Raises LeaseError if another run has written a
        lease since `found` was read."""

    @abstractmethod
    def _update(self) -> LeaseError | None:
        """Renew the lease if this run still holds it. Return an error that states the reason if this run has lost the
        lease. Raises OSError if the storage does not answer."""

    @abstractmethod
    def _remove(self) -> None:
        """Delete the lease. Raises OSError if the lease cannot be deleted."""

    def acquire(self) -> None:
        """Acquire the lease for this run, which may take up to `STALE` seconds. Raises LeaseError if another run still
        renews the lease."""
        limit, found = time.monotonic() + STALE, self._read()
        while found is not None and (state := self._state(found)) != "":
            if time.monotonic() > limit:
                if state not in ("T", "t", None):
                    raise LeaseError(self._of(found))
                break
            time.sleep(RENEWAL / 4)
            self._refuse_unless(found)
            found = self._read()
        self._take(found)
        threading.Thread(target=self._renew, name="save lease", daemon=True).start()

    def release(self) -> None:
        """Release the lease if this run still holds it."""
        self._closed.set()
        ended = self._writing.acquire(timeout=DISK)  # a renewal in progress could create the file again
        with suppress(OSError):
            if (found := self._read()) is not None and found["token"] == self._owner["token"]:
                self._remove()
        if ended:
            self._writing.release()

    def check(self) -> None:
        """Renew the lease. Raises OSError if the lease file cannot be read or written. Calls `lost` and then raises
        LeaseError if the lease is lost."""
        with self._writing:
            error = self._update()
        if error is not None:
            self._lost(error)
            raise error

    def _renew(self) -> None:
        while not self._closed.wait(RENEWAL):
            error = None
            with suppress(OSError), self._writing:  # ignored here: if the disk fails, the next save reports the error
                if not self._closed.is_set():
                    error = self._update()
            if error is not None:
                self._lost(error)
                return

    def _refuse_unless(self, expected: LeaseText | None) -> None:
        """Raise LeaseError if the folder contains a lease that differs from `expected`."""
        if (now := self._read()) is not None and now != expected:
            raise LeaseError(self._of(now))

    def _state(self, found: LeaseText) -> str | None:
        """Return the state (`Peer.state`) of the process that wrote the lease `found`; None if the process is not on
        this machine."""
        peer = Peer(found["host"], found["pid"], found["namespace"], found["started"])
        return peer.state() if peer.namespace and peer.namespace == self._owner["namespace"] else None

    def _of(self, found: LeaseText) -> str:
        who = f"process {found['pid']} on {found['host']}, started {found.get('since', 'at an unknown time')}"
        return f"another run saves to {self._shown}: its rank 0 is {who}"

    def _next(self) -> bytes:
        """Return the content of the lease for the next renewal."""
        self._count += 1
        return json.dumps(self._owner | {"renewals": self._count}).encode()


def _parsed(text: bytes | None) -> LeaseText | None:
    """Parse the content of a lease. Return None if there is no lease or if the content is damaged."""
    try:
        found = parse_json(text.decode()) if text is not None else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and "token" in found else None


class StoredLease(Lease):
    """Lease in a storage other than the local disk. If the storage supports conditional writes, a write succeeds only
    if the lease is still the one that this run last read or wrote."""

    def __init__(self, root: PurePath, lost: Callable[[LeaseError], object]) -> None:
        super().__init__(root, lost)
        self._file, self._storage = root / LEASE, storage_of(root)
        self._held: bytes | None = None
        """Content of the lease that this run last wrote."""

    def _read(self) -> LeaseText | None:
        return _parsed(self._storage.content(self._file))

    def _remove(self) -> None:
        self._storage.remove(self._file)

    def _take(self, found: LeaseText | None) -> None:
        present = self._storage.content(self._file)
        if (now := _parsed(present)) is not None and now != found:
            raise LeaseError(self._of(now))
        if (error := self._replace(present)) is not None:
            raise error

    def _update(self) -> LeaseError | None:
        return self._replace(self._held)

    def _replace(self, before: bytes | None) -> LeaseError | None:
        new = self._next()
        try:
            self._storage.replace(self._file, new, before)
        except FileExistsError:
            now = self._storage.content(self._file)
            if (found := _parsed(now)) is not None and found["token"] == self._owner["token"]:
                self._held = now  # this run wrote the lease in an earlier request, whose response was lost
                return None
            if found is not None:
                return LeaseError(f"{self._of(found)}, and has taken over while this run was suspended")
            return LostLeaseError(f"the lease of this run, {self._file}, {TAKEN}")
        self._held = new
        return None


class SaveLease(Lease):
    """Lease on the local disk."""

    def __init__(self, folder: Path, lost: Callable[[LeaseError], object]) -> None:
        super().__init__(folder, lost)
        self._file = folder / LEASE
        self._folder = folder
        self._place: _OpenFolder | None = None
        """Open folder that contains the lease, even if its path later refers to a different folder."""

        self._told = ""
        """Last printed message about a problem with the folder; empty if there is no problem."""

    def _take(self, found: LeaseText | None) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(self._folder):  # if two runs start together, the second one finds the lease of the first
            self._refuse_unless(found)
            self._write()
        self._refuse_unless(self._owner | {"renewals": self._count})
        self._place = _OpenFolder(self._folder)

    def _remove(self) -> None:
        self._file.unlink()

    def check(self) -> None:
        """Check the lease, and raise OSError if the disk with the folder has been unmounted since the run started."""
        super().check()
        if self._is_unmounted():
            raise OSError(
                f"--save {self._folder} is on a different file system than at the start: mount its disk again"
            )

    def _update(self) -> LeaseError | None:
        """Renew the lease if this run still holds it. If the folder was created again, take a new lease in it. Return
        the reason if the lease is lost. Raises OSError if the disk does not respond."""
        found, here = self._read(), self._is_in_place()
        while found is None and here and self._is_being_deleted():
            found, here = self._read(), self._is_in_place()
        if found is not None and found["token"] != self._owner["token"]:
            return LeaseError(f"{self._of(found)}, and has taken over while this run was suspended")
        if found is not None or (here and self._file.exists()):  # a file that exists but contains no lease is damaged
            self._write()
            self._tell("")
        elif here:
            return LostLeaseError(f"the lease of this run, {self._file}, {TAKEN}")
        elif not self._folder.exists() or self._is_unmounted():
            self._tell(f"--save {self._folder} {UNMOUNTED if self._is_unmounted() else GONE}")
        else:
            with folder_lock(self._folder):
                if (found := self._read()) is not None:
                    return LeaseError(f"{self._of(found)}, in a folder that has replaced this run's folder")
                self._write()
            self._place = _OpenFolder(self._folder)
            self._tell("")
        return None

    def _is_in_place(self) -> bool:
        """Return True if the path of the --save folder still refers to the folder in which this run took its lease."""
        return self._place is not None and self._place.is_at(self._folder)

    def _is_being_deleted(self) -> bool:
        """Return True if entries of the folder disappear while this method waits. A missing lease does not prove that
        another run has taken over, because `rm -r` may have deleted the lease before the rest of the folder."""
        before = _entries(self._folder)
        time.sleep(RENEWAL / 4)
        return not before <= _entries(self._folder)

    def _is_unmounted(self) -> bool:
        """Return True if the path of the folder is on a different file system than when the run started, so that the
        disk must have been unmounted. If the folder does not exist, check the nearest parent folder that exists."""
        if self._place is None or self._read() is not None:
            return False
        nearest = next(folder for folder in (self._folder, *self._folder.absolute().parents) if folder.exists())
        return os.stat(nearest).st_dev != self._place.file_system

    def _tell(self, problem: str) -> None:
        """Print a line when a problem with the folder occurs, and another line when the problem is resolved."""
        if problem != self._told:
            print(problem or f"--save {self._folder} is available again", file=sys.stderr, flush=True)
        self._told = problem

    def _read(self) -> LeaseText | None:
        try:
            return _parsed(self._file.read_bytes())
        except OSError:
            return None

    def _write(self) -> None:
        new = self._file.with_name(f"{LEASE}-{self._owner['token']}")
        try:
            new.write_bytes(self._next())
            new.replace(self._file)
        finally:
            new.unlink(missing_ok=True)


class _OpenFolder:
    """Folder that is kept open, so that no later folder gets the same inode number. Raises OSError if the folder does
    not exist."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        self.file_system = os.fstat(self._descriptor).st_dev

    def is_at(self, path: Path) -> bool:
        """Return True if `path` still refers to this open folder, and not to a later folder at the same path. Raises
        OSError if the disk does not respond."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), path.stat())
        except OSError as error:
            # ESTALE: the folder was deleted on another host
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
                return False
            raise

    def __del__(self) -> None:
        os.close(self._descriptor)


def _entries(folder: Path) -> set[str]:
    """Return the paths of all files and folders in a folder."""
    return {os.path.join(parent, name) for parent, folders, files in os.walk(folder) for name in (*folders, *files)}
