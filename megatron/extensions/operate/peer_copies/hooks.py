"""Callback that copies the state after steps, and resumes a run from the newest complete copies (--peer-copies)."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.path_kind import read_latest
from megatron.core.dist_checkpointing.storage import on_first_rank
from megatron.core.parallel_state import Axis
from megatron.extensions.operate.peer_copies.client import (
    Address,
    Link,
    Pace,
    address_in,
    drop_abandoned,
    folder_of,
    host_name,
    leased,
    number_of,
    opened,
    reached,
)
from megatron.extensions.operate.peer_copies.copies import Copies, Duty, Place
from megatron.extensions.operate.peer_copies.faults import (
    BY_LAUNCHER,
    RUNG,
    Fault,
    Recovery,
    drop_fault,
    first_fault,
    read_fault,
    write_fault,
)
from megatron.extensions.operate.peer_copies.flags import PeerCopyConfig
from megatron.extensions.operate.peer_copies.holder import WORLD, write_whole
from megatron.extensions.operate.peer_copies.identity import drop_identity, keep_identity, new_identity, read_identity
from megatron.extensions.operate.peer_copies.idle_hosts import IdleHost, read_note
from megatron.extensions.operate.peer_copies.memory_checkpoint import CopyError, MemoryCheckpoint, Readers, damaged
from megatron.extensions.operate.peer_copies.placement import duties, place, stored_bytes
from megatron.extensions.operate.peer_copies.sets import (
    CompleteSet,
    Inventory,
    complete_sets,
    drop_others,
    inventory,
    why_none,
)
from megatron.extensions.operate.peer_copies.shards import parts_of
from megatron.training.config.batch_size import byte_text
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Log, RunView, Task
from megatron.training.initialize import Runtime
from megatron.training.progress import BegunRun, Progress
from megatron.training.reliability.failure_report import LateRanksError
from megatron.training.reliability.run_status import record_event
from megatron.training.reliability.watchdog import Watch, Watchdog
from megatron.training.run import TrainingRun


@dataclass(frozen=True)
class Host:
    """Information about a host that each of its ranks sends to all other ranks when the run starts."""

    name: str
    holder: Address | None
    """Address of the host's holder, sent only by the rank that supervises the holder; None from all other ranks."""

    held: Inventory
    fault: Fault | None
    idle: tuple[IdleHost, ...] = ()
    """Hosts that run no rank but hold copies, as reported by the launcher processes on those hosts."""


class PeerCopies(Callback):
    """Callback that keeps copies of the training state in the memory of other hosts."""

    start_order = -1  # This callback must run before callbacks that load local checkpoints, which are older.

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self._options = config.options(PeerCopyConfig)
        assert config.checkpoint.save_root is not None
        self._save = config.checkpoint.save_root
        self._folder = folder_of(self._options.peer_copy_path, self._save)
        self._identity: str | None = None
        """Content of SAVE/peer_copies_id, which identifies the run in --save; None before the run starts."""

        self._on_disk: int | None = None
        """Iteration of the newest checkpoint in --save, as read when the run started or at the last save."""

        self._run: TrainingRun | None = None
        self._copies: Copies | None = None
        self._recovery: Recovery | None = None
        self._resumed, self._taken_back = False, False
        self._met = False
        """True after the ranks have connected to each other. From then on, rank 0 holds the lease on --save."""

        self._saved: int | None = None
        """Iteration of the last checkpoint that this process had saved when the state was last copied; None if there
        was none."""

        self._leases = list[Link]()
        """Open connections to holder processes. A holder exits some time after its last connection is closed."""

    def watches(self, watchdog: Watchdog) -> Sequence[Watch]:
        self._watchdog = watchdog
        watchdog.failures.at_exit.append(self._note_fault)
        watchdog.failures.memory = self._advice
        watchdog.requests.undecided = True
        return ()

    @property
    def _lifetime(self) -> str:
        """Return a phrase for messages that says how long copies are kept."""
        minutes = self._options.peer_copy_keep_minutes
        return f"hosts keep copies for {minutes:g} minutes after their last rank has ended (--peer-copy-keep-minutes)"

    def _advice(self) -> str:
        """Return the part of a failure message that says for how many minutes the same command can still resume from
        copies in memory. Return an empty string if there are no copies."""
        if not self._resumed and (self._copies is None or self._copies.complete is None):
            return ""
        return f"within {self._options.peer_copy_keep_minutes:g} minutes: it resumes from copies in memory"

    def on_setup(self, runtime: Runtime) -> None:
        """Start the holder of this host, and exchange lists of the existing copies with all hosts. Collective."""
        world, own = runtime.state.world, host_name()
        names = gather_objects(own, world)
        self._met = True
        self._leads = names.index(own) == world.rank
        mine = Host(own, None, Inventory(), None)
        if self._leads:
            keep = 60 * self._options.peer_copy_keep_minutes
            drop_abandoned(self._folder, keep)
            holder, lease = opened(self._folder, keep)
            self._leases.append(lease)
            held, fault = inventory(self._folder, own), read_fault(self._folder)
            mine = Host(own, holder, held, fault, read_note(self._folder))
            drop_fault(self._folder)
        hosts = gather_objects(mine, world)
        self._host_of = [host.name for host in hosts]
        self._holders = {host.name: host.holder for host in hosts if host.holder is not None}
        if not self._leads:
            with suppress(OSError):  # the connection of the supervising rank keeps the holder alive
                self._leases.append(leased(self._holders[own]))
        self._held = [host.held for host in hosts]
        self._idle = {each.name: each for host in hosts for each in host.idle if each.name not in names}
        self._holders |= {name: each.holder for name, each in self._idle.items()}
        self._held += [each.held for each in self._idle.values()]
        self._fault = first_fault([host.fault for host in hosts])
        generations = [number_of(name) for held in self._held for name in held.parts or {}]
        token = gather_objects(secrets.token_hex(4), world)[0]
        self._generation = f"g{max(generations, default=0) + 1:06d}-{token}"
        if not (self._loads and complete_sets(self._held)):
            self._watchdog.requests.decide(unsaved=False)

    @property
    def _loads(self) -> bool:
        """Return True if the run's flags permit loading copies."""
        options = self.config.checkpoint
        return not options.anew and options.load_optim

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        world = begun.state.world
        found: CompleteSet | None = None
        progress, why = None, ""
        if self._loads:
            why = self._drop_foreign(say, world)
            found, progress, unused = self._resume(begun, say, data, world, foreign=bool(why))
            why = unused or why
        self._resumed = progress is not None
        if progress is None:
            self._renew_identity(say, world)
        if self._leads:
            kept = [copy for copies in found.copies.values() for copy in copies] if found and progress else []
            drop_others(self._folder, kept)
        if self._fault is not None:
            from_disk = "checkpoint on disk" if self._on_disk else "the beginning"
            source = "copies in memory" if progress is not None else from_disk
            rung = os.environ.get(RUNG) or BY_LAUNCHER
            self._recovery = Recovery(self._fault, rung, source, why)
        return progress

    def _drop_foreign(self, say: Callable[[str], None], world: Axis) -> str:
        """Discard copies that do not belong to the run in --save (`identity`). Return the reason if no copies remain,
        and an empty string otherwise. Collective."""
        save = self._save
        self._identity = on_first_rank(lambda: read_identity(save), world)
        mine = [held.of_folder(self._identity) for held in self._held]
        why, before = "", sum(len(held.copies) for held in self._held)
        self._held, left = mine, sum(len(held.copies) for held in mine)
        if left < before:
            what = "copies in memory" if not left else "some copies in memory"
            foreign = f"do not belong to the current content of --save {save}"
            then = "which was deleted, replaced or resumed without them"
            say(f" {what} are not used, and are deleted: they {foreign}, {then}")
            why = f"copies in memory {foreign}"
        return "" if left else why

    def _renew_identity(self, say: Callable[[str], None], world: Axis) -> None:
        """Write a new run identifier to --save, because this run does not resume from copies. Collective."""
        self._identity, problem = on_first_rank(lambda: new_identity(self._save), world)
        if problem:
            why = f"--save {self._save} cannot be written ({problem})"
            say(f" no restart can use the copies in memory that this start makes: {why}")

    def _resume(
        self,
        begun: BegunRun,
        say: Callable[[str], None],
        data: Callable[[int], str | None],
        world: Axis,
        foreign: bool,
    ) -> tuple[CompleteSet | None, Progress | None, str]:
        """Load the newest step for which all parts have an undamaged copy. `foreign` is True if copies were found, but
        none of them belong to the run in --save. Return the loaded copies, the progress of the run at that step, and an
        empty string. Return None, None and the reason if no copies were loaded."""
        root = begun.config.checkpoint.load_root
        assert root is not None
        self._on_disk = on_first_rank(lambda: read_latest(root), world)
        on_disk = self._on_disk or 0
        sets, why = complete_sets(self._held), why_none(self._held)
        if not why and not sets and not foreign and self._identity is not None:
            why = f"no host holds copies of the previous start; {self._lifetime}"
        for complete in sets:
            found = self._verified(complete, world)
            if found.iteration < on_disk:
                why = f"the checkpoint on disk is newer than iteration {found.iteration}"
                break
            if not found.lost:
                return self._load(found, begun, say, data, on_disk)
            why = f"all copies of part {found.lost} at iteration {found.iteration} are damaged"
            if complete is not sets[-1]:
                say(f" {why}: trying an older step")
        if why:
            say(f" copies in memory are not used: {why}")
        return None, None, why

    def _verified(self, found: CompleteSet, world: Axis) -> CompleteSet:
        """Return the set `found` without damaged copies. The ranks of a host verify its copies. Collective."""
        own = host_name()
        ranks = [rank for rank, host in enumerate(self._host_of) if host == own]
        here = [copy for copies in found.copies.values() for copy in copies if copy.host == own]
        mine = damaged(self._folder, here[ranks.index(world.rank) :: len(ranks)])
        return found.without([copy for each in gather_objects(mine, world) for copy in each])

    def checkpoint_of(self, iteration: int) -> MemoryCheckpoint | None:
        """Return this run's copies of an iteration as a checkpoint; None if the copies no longer exist. Collective."""
        run = self._run
        assert run is not None
        self._await_copies()
        self._taken_back = True
        world = run.runtime.state.world
        held = gather_objects(inventory(self._folder, host_name()) if self._leads else Inventory(), world)
        for each in complete_sets(held):
            if (each.generation, each.iteration) == (self._generation, iteration):
                found = self._verified(each, world)
                holders = self._holders if self._copies is None else self._copies.holders()
                readers = Readers(self._folder, host_name(), holders, self._idle)
                return None if found.lost else MemoryCheckpoint(found, readers, self._leads, world)
        return None

    def _load(
        self,
        found: CompleteSet,
        begun: BegunRun,
        say: Callable[[str], None],
        data: Callable[[int], str | None],
        on_disk: int,
    ) -> tuple[CompleteSet | None, Progress | None, str]:
        """Load the training state from the copies `found`. Return the same values as `_resume`. Raises CopyError if
        copies are lost during the load and there is no checkpoint on disk."""
        try:
            readers = Readers(self._folder, host_name(), self._holders, self._idle)
            checkpoint = MemoryCheckpoint(found, readers, self._leads, begun.state.world)
            if int(checkpoint.payload.get("saved_iteration") or 0) <= on_disk:
                hosts = len(set(self._host_of))
                where = f"copies in the memory of {hosts} {'hosts' if hosts > 1 else 'host'}"
                return found, begun.resume_with(checkpoint, say, data, where), ""
            why = f"--load was set back to iteration {on_disk} since"
        except CopyError as error:
            if not on_disk:
                raise
            why = str(error)
        say(f" copies in memory are not used: {why}")
        return None, None, why

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        """Divide the state into parts, and return the tasks that copy them. Collective."""
        self._run = run
        state, rank = run.runtime.state, run.runtime.launch.rank
        tensors, _ = self._contents(run)
        mine = parts_of(tensors, state, rank)
        every = {stored.name: stored.part for each in gather_objects(mine, state.world) for stored in each}
        names = sorted(every)
        placed = place(self._host_of, [every[name] for name in names], self._options.peer_copies)
        there = {stored.name: stored for stored in mine}
        own = [Duty(there[names[number]], to) for number, to in duties(rank, placed)]
        own.sort(key=lambda duty: duty.stored.part.writer != rank or len(duty.stored.part.replicas) > 1)
        self._check_room(stored_bytes([every[name] for name in names], placed)[host_name()], run.say, state.world)
        folder = self._folder / self._generation
        if self._identity is None:  # the state was not loaded by this callback
            self._renew_identity(run.say, state.world)
        if self._leads:
            folder.mkdir()
            write_whole(folder / WORLD, json.dumps({"parts": names, "identity": self._identity}))
        gather_objects(None, state.world)  # wait until every host has created its folder
        rate = self._options.peer_copy_bandwidth
        share = None if rate is None else 1e6 * rate / self._host_of.count(host_name())
        where = Place(
            folder=self._folder,
            generation=self._generation,
            holders=self._holders,
            own=host_name(),
            keep=60 * self._options.peer_copy_keep_minutes,
            leads=self._leads,
            rank=rank,
        )
        self._copies = Copies(where, own, self._store(), state.world.size, Pace(share))
        if self._leads:
            self._copies.when_complete(partial(drop_generations, self._folder, self._generation))
        back = Task(
            "copy of an earlier state", None, self._copy, also=lambda: self._taken_back, before_step=True, counts=True
        )
        return (
            back,
            Task("copy of the state", self._options.peer_copy_interval, self._copy, counts=True),
            Task("report of a recovery", 1, self._report_recovery, counts=True, reads_result=False),
        )

    def _check_room(self, nbytes: int, say: Callable[[str], None], world: Axis) -> None:
        """Raise ValueError on every rank if the memory of a host cannot hold the copies of two steps. If copies already
        exist, only one more step must fit. If the memory is large enough but currently contains other files, print a
        warning instead of raising. Collective."""
        disk = shutil.disk_usage(self._folder)
        needed = (1 if any(self._folder.glob("g*")) else 2) * nbytes
        has = (
            f"{host_name()} has {byte_text(disk.free)} there, and needs {byte_text(needed)}"
            if disk.free < needed
            else ""
        )
        found = [each for each in gather_objects((disk.total < needed, has), world) if each[1]]
        path = self._options.peer_copy_path
        if too_small := [why for always, why in found if always]:
            remedy = "give the container a larger one (docker run --shm-size), or use another file system in memory"
            raise ValueError(str(Problem("--peer-copy-path", path, f"is too small: {too_small[0]}", remedy)))
        if found:
            say(f" copies in memory are incomplete until there is more room in --peer-copy-path {path}: {found[0][1]}")

    def on_start(self, run: RunView) -> None:
        """If the state was loaded from copies, mark it as unsaved, because the same state may not be on disk."""
        if self._resumed:
            assert isinstance(run, TrainingRun)
            run.saver.last = None
        if self._watchdog.requests.undecided:
            self._watchdog.requests.decide(self._resumed)

    def _store(self) -> dist.Store:
        board = self._watchdog.board
        return dist.HashStore() if board is None else board.store

    def _contents(self, run: TrainingRun) -> tuple[dict, dict[str, object]]:
        run.guard.settle()
        run.guard.store_means()
        return run.saver.checkpoint.contents(run.progress)

    def _copy(self) -> None:
        run, copies = self._run, self._copies
        assert run is not None and copies is not None
        self._taken_back = False
        self._await_copies()
        if line := copies.news():
            run.say(f" {line}")
        tensors, payload = self._contents(run)
        first = run.runtime.launch.rank == 0
        saved = run.runtime.watchdog.failures.saved
        if first and saved != self._saved:
            self._saved = saved
            self._note_save()
        payload |= {"saved_iteration": self._on_disk}
        copies.copy(run.progress.iteration, tensors, payload if first else None)

    def _note_save(self) -> None:
        """After a save, read from --save which checkpoint is the latest. The latest checkpoint in --save may be older
        than this save, because local checkpoints are uploaded later. Write SAVE/peer_copies_id again if --save was
        deleted before the save."""
        assert self._identity is not None
        with suppress(OSError, ValueError):  # if --save is not available, the next save reports the error
            keep_identity(self._save, self._identity)
            self._on_disk = read_latest(self._save)

    def _await_copies(self) -> None:
        """Wait for copies in progress. Raises LateRanksError after --distributed-timeout-minutes."""
        if self._copies is None or self._run is None:
            return
        if late := self._copies.wait(60 * self.config.parallel.distributed_timeout_minutes):
            raise LateRanksError(late, "their copies", self._run.runtime.watchdog.status.limit)

    def _note_fault(self) -> None:
        """Record the failure that ends the run, so that a restart can report it. If the run ends because another run
        holds the lease, record nothing, because the copies belong to the other run."""
        cause = self._watchdog.failures.reported
        if cause is not None and self._met:
            done = 0 if self._run is None else self._run.progress.iteration
            with suppress(OSError):
                write_fault(self._folder, Fault(cause.title, cause.who, cause.at, time.time(), done))

    def _report_recovery(self) -> None:
        """Report the recovery from the failure after the first step that follows a restart."""
        run, recovery = self._run, self._recovery
        assert run is not None
        if recovery is None or not run.runtime.is_main:
            return
        self._recovery = None
        resumed = run.first_iteration
        run.say(f" {recovery.line(time.time(), resumed)}")
        record_event(self.config.checkpoint.save, "recovery", **recovery.record(time.time(), resumed))

    def on_end(self, run: RunView) -> None:
        """End the holder process at the end of the run. The state is on disk, and no restart needs the copies."""
        self._await_copies()
        if self._run is not None:
            if self._run.runtime.is_main:
                with suppress(OSError):
                    drop_identity(self._save)
            gather_objects(None, self._run.runtime.state.world)
        if self._leads:
            with suppress(OSError):
                reached(address_in(self._folder)).end()


def drop_generations(folder: Path, kept: str) -> None:
    """Delete the copies of all generations except `kept`. A generation consists of the copies made after one start."""
    for generation in folder.glob("g*"):
        if generation.name != kept:
            shutil.rmtree(generation, ignore_errors=True)
