"""Restarts of failed ranks within the launcher's processes (--restarts-in-job).

Each process that the launcher starts is called a parent. A parent imports torch, and forks a child process that trains
as a rank. If a rank fails, its child process ends, but the parent does not, so the launcher does not notice the
failure. The parent forks another child, in which all modules are already imported. When the child of any rank fails,
all children end. All parents then wait for each other before they fork again, so that no child from before the failure
is left. The last N parents have no rank, where N is the value of --spare-ranks. These spares wait with all modules
imported until a rank is lost together with its parent, for example on a lost host. If there are not enough spares, the
run continues on fewer ranks if possible. Otherwise, all parents end, and the launcher restarts the ranks.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import count

from megatron.extensions.operate.job_restarts.flags import RestartConfig
from megatron.extensions.operate.job_restarts.forking import fork
from megatron.extensions.operate.job_restarts.layouts import (
    config_in,
    device_here,
    flags_of,
    layout_from,
    layout_text,
    smaller_layout,
)
from megatron.extensions.operate.job_restarts.parents import ANSWER, LOOK, Clock, LostStoreError, Parents, Start
from megatron.extensions.operate.job_restarts.roster import fewer, replaced, spares_of
from megatron.extensions.operate.job_restarts.signals import ParentSignals, SecondSignalError
from megatron.extensions.operate.peer_copies.faults import FEWER_RANKS, RUNG, SAME_RANKS, SPARES, note_death
from megatron.extensions.operate.peer_copies.idle_hosts import leave_note, memory_of, offered
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback, Log, Task
from megatron.training.reliability.child_processes import process_state
from megatron.training.reliability.launch import BEGAN, START, Launch, write_error_file
from megatron.training.reliability.lossy_output import flush_output
from megatron.training.reliability.rank_store import NoStoreError
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.starts import Attempt
from megatron.training.reliability.watchdog import Watch, Watchdog
from megatron.training.run import TrainingRun

ASK = 0.4
"""Seconds between two checks of the store."""

GRACE = 8.0
"""Maximum time in seconds that a child may take to exit after another rank has failed. After this time, the child is
killed."""

STUCK = 30.0
"""Maximum time in seconds that a parent waits for a child to end after SIGKILL. For example, the kernel cannot end a
process that is blocked in a driver."""

STOPPED = 6.0
"""Time limit in seconds for a process that a signal has stopped (SIGSTOP). After this time, a stopped child, or a
stopped parent of the next rank on the same machine, is killed."""

UNMET = 120.0
"""Time limit in seconds for a child to connect to the other ranks. If the child exceeds the limit although its parent
can reach the store, the parent kills the child and forks a new one."""

SIGNAL_NAMES = {each.value: each.name for each in signal.Signals}
"""Maps signal numbers to names. Most real-time signals have no name."""

IMPORTED_LATE = ("torch._dynamo", "megatron.training.training")
"""Modules that torch and this program normally import on first use. The parent imports these modules before it forks a
child, so that the child inherits them. Importing these modules takes seconds."""

IN_ORDER = 8
"""Index of the byte in `_progress` that states whether the run chose the exit code of the child (1), or not (0), for
example because the child crashed."""

MET = 9
"""Index of the byte in `_progress` that states whether the child has connected to the other ranks (1) or not (0)."""

_progress: mmap.mmap | None = None
"""Memory that a parent shares with its child. The first 8 bytes contain the last iteration that the child has
completed; the bytes `IN_ORDER` and `MET` follow."""


def end_in_order() -> None:
    """Notify the parent that this child is about to exit with an exit code that the run chose."""
    if _progress is not None:
        _progress[IN_ORDER] = 1


def report_met() -> None:
    """Notify the parent of this process that the rank has connected to the other ranks."""
    if _progress is not None:
        _progress[MET] = 1


def has_met() -> bool:
    """Return True if the child of this parent has connected to the other ranks."""
    return _progress is not None and bool(_progress[MET])


class ReportsProgress(Callback):
    """Callback that reports the progress and the end of the rank to the parent process."""

    def watches(self, watchdog: Watchdog) -> Sequence[Watch]:
        report_met()
        watchdog.failures.at_exit.append(end_in_order)
        return ()

    def tasks(self, run: TrainingRun, log: Log) -> Sequence[Task]:
        def report() -> None:
            if _progress is not None:
                _progress[:8] = run.progress.iteration.to_bytes(8, "little")

        return (Task("progress for the parent", 1, report, counts=True, reads_result=False),)


class Kept:
    """Child process that a parent forks. The child trains as the rank of the parent."""

    def __init__(self, attempt: Callable[[], int], environ: Mapping[str, str]) -> None:
        flush_output()
        self.pid = fork()
        if not self.pid:
            code = 1
            try:
                os.environ |= environ
                code = attempt()
                end_in_order()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                flush_output()
                os._exit(code)

    def ended(self) -> int | None:
        """Return the exit code of the child, which is negative if a signal ended it. Return None while the child
        runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def is_stopped(self) -> bool:
        """Return True if a signal has stopped the child."""
        return process_state(self.pid) == "T"

    def kill(self) -> None:
        """Kill the child. The child may have ended already."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


ENDS = (ExitCode.BAD_CONFIGURATION, ExitCode.TO_BE_RESUMED)
"""Exit codes after which the ranks are not started again, even if user code exited with one of these codes."""


def is_failure(code: int) -> bool:
    """Return True if an exit code is a failure after which the ranks may be started again."""
    return code == ExitCode.FAILED or code < 0


def start_again(config: RunConfig, launch: Launch, attempt: Attempt) -> int:
    """Run a process of the launcher as a parent: fork the process of a rank, and fork it again whenever the parents of
    all ranks agree to restart. Return the exit code of the rank's last process."""
    global _progress
    _progress = mmap.mmap(-1, MET + 1)
    spares = config.options(RestartConfig).spare_ranks
    if spares >= launch.world_size:
        if launch.rank == 0:
            rule = f"must be below {launch.world_size}, the processes that the launcher has started"
            print(Problem("--spare-ranks", spares, rule, "start more processes, or use fewer spares"), file=sys.stderr)
        return ExitCode.BAD_CONFIGURATION
    for name in IMPORTED_LATE:
        import_module(name)  # children inherit imported modules, so they need not import them again
    try:
        parents = Parents.of(config, launch)
    except NoStoreError as error:
        print(f"RUN FAILED: {error}", file=sys.stderr, flush=True)
        return ExitCode.FAILED
    return Parent(config, launch, attempt, parents).run()


class Parent:
    """Process of the launcher that runs a rank in a child process, or waits as a spare."""

    def __init__(self, config: RunConfig, launch: Launch, attempt: Attempt, parents: Parents) -> None:
        self.config, self.launch = config, launch
        self._attempt, self._parents = attempt, parents
        options = config.options(RestartConfig)
        self._limit = options.restarts_in_job
        workers = tuple(range(launch.world_size))
        self._start = Start(workers[: launch.world_size - options.spare_ranks], workers)
        self._best, self._fruitless = -1, 0
        self._began = str(time.monotonic())
        self._signals = ParentSignals()

    def run(self) -> int:
        """Run the rank of this process until the run ends or cannot be restarted. Return the exit code for this
        process."""
        if not self.config.training.exit_signal_handler:
            return self._starts()
        try:
            with self._signals.taken():
                return self._starts()
        except SecondSignalError:
            code = ExitCode.KILLED + (self._signals.second or 0)
            print("a second signal arrived between two starts: exiting immediately", file=sys.stderr, flush=True)
            with suppress(LostStoreError):
                self._parents.leave(code, ())
            return code

    def _starts(self) -> int:
        code, why = int(ExitCode.FAILED), ""
        before = self._start
        try:
            for number in count():
                code, why = self._one_start(number)
                if why or not is_failure(code):
                    self._parents.leave(code if code >= 0 else ExitCode.FAILED, self._start.living)
                    break
                with self._signals.between_starts():
                    before, self._start = self._start, self._parents.gather(number + 1, self._start, self._decide)
                self._tell(before)
                if self.launch.rank in self._start.living[:1]:
                    self._parents.forget(number + 1)
                if why := self._start.ends:
                    break
                if self.launch.rank not in self._start.living:
                    why = "the other ranks have continued without it"
                    break
        except LostStoreError as error:
            why = str(error)
        if why and is_failure(code) and self.launch.rank in before.roster:
            print(
                f"rank {before.roster.index(self.launch.rank)} is not started again in the job: {why}",
                file=sys.stderr,
                flush=True,
            )
        return code if code >= 0 else ExitCode.FAILED

    def _one_start(self, number: int) -> tuple[int, str]:
        """Run the rank of this process until the rank ends, or wait as a spare until the ranks end. `number` counts the
        starts of the ranks from 0.

        Return the exit code and the reason why the ranks are not started again. If the reason is empty and the exit
        code is a failure, the ranks are started again."""
        roster, worker = self._start.roster, self.launch.rank
        if worker not in roster:
            return self._wait(number)
        rank = roster.index(worker)
        launch = replace(self.launch, rank=rank, world_size=len(roster))
        environ = {START: str(number), BEGAN: self._began, RUNG: self._start.rung}
        environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(roster))}
        config = self.config
        if self._start.layout:
            config = config_in(config, len(roster), layout_from(self._start.layout))
        spares = spares_of(roster, self._start.living)
        if rank == 0 and spares:
            leave_note(self.config, self._parents.offers(number, spares))
        began = time.time()
        assert _progress is not None
        _progress[IN_ORDER] = _progress[MET] = 0
        made_before = self._iteration_made()
        with self._signals.held():
            child = Kept(partial(self._begin, config, launch), environ)
            self._signals.hand_to(child.pid)
        code = self._watch(child, number)
        self._signals.child = None
        if self._signals.second is not None and is_failure(code):
            return ExitCode.KILLED + self._signals.second, ""
        how = SIGNAL_NAMES.get(-code, f"signal {-code}") if code < 0 else f"code {code}"
        if not (_progress[IN_ORDER] or is_failure(code) or code in ENDS):
            code = ExitCode.FAILED
            print(f"rank {rank} has ended with {how} before the end of the run", file=sys.stderr, flush=True)
        made = self._iteration_made()
        # A rank that has completed steps records its own failure, but a busy machine may end it before it has done so.
        refused = code == ExitCode.FAILED and _progress[IN_ORDER] and made == made_before
        if is_failure(code) and not refused and (folder := memory_of(self.config)) is not None:
            note_death(folder, launch.name(socket.gethostname(), rank), how, made, began)
        self._fruitless = 1 if made > self._best else self._fruitless + 1
        self._best = max(self._best, made)
        if not is_failure(code):
            return code, ""
        if self._fruitless > self._limit:
            return code, f"{self._limit} consecutive starts completed no step"
        self._parents.ask(number + 1)
        return code, ""

    @staticmethod
    def _iteration_made() -> int:
        """Return the last iteration that a child of this parent has completed; 0 if there is none."""
        assert _progress is not None
        return int.from_bytes(_progress[:8], "little")

    def _begin(self, config: RunConfig, launch: Launch) -> int:
        """Train as the rank that `launch` describes. This method runs in a child process."""
        self._signals.give_back()
        return self._attempt(config, launch)

    def _wait(self, number: int) -> tuple[int, str]:
        """Wait as a spare, without a rank, until the ranks end or are restarted. Return an exit code and a reason, like
        `_one_start`. Spares ignore signals that request the ranks to save and exit. A spare process ends when the ranks
        end."""
        offer, lease = offered(self.config)
        self._parents.offer(number, offer)
        with closing(lease) if lease is not None else nullcontext():
            while not self._parents.asked(number + 1):
                if (code := self._parents.over()) is not None:
                    self._parents.left()
                    if code:
                        write_error_file("a spare process, which ended together with the ranks", time.time() + 1)
                    return code, "the run has ended"
                self._parents.beat()
                self._parents.tidy()
                if self._parents.lost(self._start.roster):
                    self._parents.ask(number + 1)  # all ranks are lost, so this spare requests their restart
                time.sleep(ASK)
        return ExitCode.FAILED, ""

    def _watch(self, child: Kept, number: int) -> int:
        """Wait until a child ends, and return the exit code of the child. The child is killed if another rank fails,
        after a second signal, if a signal has stopped the child, or if the child does not connect to the other ranks in
        time."""
        clock, following = Clock(), self._next_worker()
        ask_at = ran_at = following_ran_at = 0.0
        end_at = lost_at = stuck_at = float("inf")
        while (code := child.ended()) is None:
            now = clock.seconds()
            ran_at = ran_at if child.is_stopped() else now
            if now > min(end_at, ran_at + STOPPED):
                child.kill()
                end_at = ran_at = float("inf")
                stuck_at = min(stuck_at, now + STUCK)
            if now > stuck_at:
                where = "in a driver or by a disk"
                print(f"process {child.pid} has not ended {STUCK:g} s after SIGKILL: it may be blocked {where}")
                return -signal.SIGKILL
            if self._signals.second is not None and stuck_at == float("inf"):
                end_at = min(end_at, now + GRACE)
            if now > ask_at:
                ask_at = now + ASK
                try:
                    self._parents.beat()
                    self._parents.tidy()
                    following_ran_at = following_ran_at if self._parents.is_stopped(following) else now
                    if now > following_ran_at + STOPPED:
                        self._parents.kill(following)
                    lost_at = min(lost_at, now) if self._parents.lost([following]) else float("inf")
                    if now > lost_at + GRACE:  # a child that has not yet connected may not notice the lost rank
                        self._parents.ask(number + 1)
                    end_at = now + GRACE if end_at == float("inf") and self._parents.asked(number + 1) else end_at
                    if end_at == stuck_at == float("inf") and now > UNMET and not has_met():
                        print(f"process {child.pid} has not reached the store in {UNMET:g} s", file=sys.stderr)
                        end_at = now
                except LostStoreError:  # ignored, because the child also detects the loss of the store
                    ask_at = clock.seconds() + ANSWER
            time.sleep(LOOK)
        return code

    def _next_worker(self) -> int:
        """Return the worker (launcher process) that runs the next rank. Each parent watches the parent of the next
        rank."""
        roster = self._start.roster
        return roster[(roster.index(self.launch.rank) + 1) % len(roster)]

    def _decide(self, came: Collection[int], host_of: dict[int, str]) -> Start:
        """Plan how to start the ranks again. `came` contains the workers that are ready, and `host_of` maps these
        workers to their hosts. The ranks keep their processes if possible. Otherwise, spares replace lost processes. If
        there are too few spares, the run continues with fewer ranks."""
        before = self._start
        living = tuple(sorted(came))
        gone = [worker for worker in before.roster if worker not in living]
        if not gone:
            return replace(before, living=living, rung=SAME_RANKS, why=())
        ranks = ", ".join(str(before.roster.index(worker)) for worker in gone)
        why = f"the ranks cannot restart in the same processes: the parents of ranks {ranks} are lost"
        if (found := replaced(before.roster, living, host_of)) is not None:
            return replace(before, roster=found, living=living, rung=SPARES, why=(why,))
        waiting = len(living) - (len(before.roster) - len(gone))
        spare = f"there are too few spares: {len(gone)} needed, {waiting} available"
        try:
            choice = smaller_layout(self.config, len(living), device_here())
            missing = f"no layout for the same batch is legal on {len(living)} ranks"
        except Exception as error:  # the search is optional, because the launcher can still restart the ranks
            choice, missing = None, f"the search for another layout failed: {type(error).__name__}: {error}"
        if choice is not None:
            roster = fewer(before.roster, living, host_of, choice.ranks)
            return Start(roster, living, FEWER_RANKS, (why, spare), layout_text(choice.layout))
        ends = f"{len(gone)} of {len(before.roster)} ranks were lost"
        return Start((), living, why=(why, spare, missing), ends=ends)

    def _tell(self, before: Start) -> None:
        """Print how the ranks are started again, and why better recovery methods were not possible. Only one worker
        prints this."""
        start = self._start
        if self.launch.rank not in start.living[:1]:
            return
        for line in start.why:
            print(f" {line}", file=sys.stderr, flush=True)
        if start.layout and start.layout != before.layout:
            flags = flags_of(self.config, len(start.roster), layout_from(start.layout))
            print(f" {len(start.roster)} ranks continue with {flags}", file=sys.stderr, flush=True)
        for rank, worker in enumerate(start.roster):
            if start.rung == SPARES and worker != before.roster[rank]:
                print(f" rank {rank} now runs in spare process {worker} of the launcher", file=sys.stderr, flush=True)
