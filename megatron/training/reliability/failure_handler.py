"""End all ranks after one fails. The first failed rank writes one report for all ranks. The other ranks report to this
rank the line of code that they execute, and exit.

If a rank's error may be due to another rank's error, the rank first waits for a report of the other error. Every public
method of `FailureHandler` except `connect` ends the process.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

from megatron.training.config.run_config import CheckpointConfig
from megatron.training.reliability.child_processes import end_children
from megatron.training.reliability.failure_report import (
    ADVICE,
    GONE,
    Failure,
    LateRanksError,
    died,
    hung,
    is_consequence,
)
from megatron.training.reliability.launch import START, Launch, restarts_left, tell_last, write_error_file
from megatron.training.reliability.lossy_output import flush_output
from megatron.training.reliability.rank_status import RankStatus, Standing
from megatron.training.reliability.rank_store import PERIOD, Board, NoStoreError, launcher_has_store, store_refuses
from megatron.training.reliability.run_status import ExitCode, Outcome, code_for_launcher
from megatron.training.reliability.stack_dump import StackDump
from megatron.training.reliability.stop_requests import SignalListener

GRACE = 3.0
"""Seconds that a failing rank waits for other ranks to report an earlier error that may have caused its own error."""

GATHER = 2.0
"""Seconds within which the other ranks must report the line of code that they execute."""

STORE_ANSWER = 1.5
"""Seconds to wait for an answer from the store. A reachable store answers within this time."""

PARTING = 5.0
"""Maximum number of seconds that an exiting rank waits until the other ranks have read why it exits."""

LAST_RESORT = 30.0
"""Seconds after which an exiting process is killed if it still waits for the store, the terminal or a disk."""


class FailureHandler:
    """Handler that reports a failure to the other ranks, the screen, the launcher and OUTCOME_FILE, and then exits."""

    def __init__(
        self, launch: Launch, status: RankStatus, stacks: StackDump, signals: SignalListener, outcome: Outcome
    ) -> None:
        self.at_exit: list[Callable[[], None]] = []
        """Functions called before the process exits because of a failure, each on a thread and for at most a second."""

        self.checkpoints = CheckpointConfig()
        """Folders from which the run loads checkpoints and to which it saves them."""

        self.saved: int | None = None
        """Last iteration that the run has saved."""

        self.memory: Callable[[], str] = str
        """Function that describes the training state in memory from which a restart resumes; "" if none exists."""

        self.reported: Failure | None = None
        """Failure that ends this rank, for use in `at_exit` functions, or None if the rank ends for another reason."""

        self.left = False
        """True if this rank no longer needs the store. The process that hosts the store may then end at any time."""

        self._launch = launch
        self._status = status
        self._stacks = stacks
        self._signals = signals
        self._outcome = outcome
        self._store: Board | None = None
        self._ending = threading.Lock()

    def connect(self, board: Board) -> None:
        """Connect to the store. After this call, failures of this rank are reported to all ranks."""
        self._store = board

    @property
    def _board(self) -> Board:
        assert self._store is not None, "not connected"
        return self._store

    def fail(self, error: BaseException) -> NoReturn:
        """End all ranks because of an exception on the training thread. Without a store, re-raise the exception."""
        status = self._status
        rank = self._launch.rank
        here = socket.gethostname()
        if isinstance(error, NoStoreError):
            what = f"{error}\nwaited for {status.limit}" if error.waited else str(error)
            alone = Failure(rank, self._launch.name(here), status.phase, "no store", what, ADVICE["no store"])
            if self._launch.local_rank == 0:
                self._outcome.recorded = False  # do not write to --save: it may belong to another run
                self._outcome.end(alone.code, f"{alone.who}: {error}")
            tell_last(alone.text())
            self._exit(alone.code)
        if self._store is None:
            raise error
        end_within(LAST_RESORT)
        status.error, at = error, time.time()
        silent = self._await_cause(error) if is_consequence(error) else []
        with self._only_once():
            who, phase = self._board.name(rank), status.phase_and_action()
            failure = Failure.of(error, rank, who, phase, self.checkpoints, self.saved, self.memory())
            self._end(replace(failure, at=at), silent, waited=is_consequence(error))

    def report_gone(self, rank: int, seen: float | None = None) -> NoReturn:
        """End all ranks because the process of `rank` is gone. `seen` is the time of the rank's last sign of life."""
        with self._only_once():
            board, phase = self._board, ""
            with suppress(RuntimeError):  # raised if the process that is gone hosted the store
                phase = board.last_phase(rank)
            phase = f"{phase or 'unknown'}, at its last sign of life"
            pid = f" {board.peers[rank].pid}" if rank in board.peers else ""
            last_words = self._stacks.last_words(rank)
            what = f"process{pid} is gone and left no traceback{last_words}"
            failure = Failure(
                self._launch.rank,
                board.name(rank),
                phase,
                GONE,
                what,
                died(self.checkpoints, self.saved, self.memory()),
            )
            self._end(replace(failure, at=seen or failure.at))

    def unreachable(self, failure: Failure, ranks: Collection[int]) -> NoReturn:
        """End this rank because `ranks` on other hosts cannot be reached. One of these ranks may host the store."""
        if self.ending:
            time.sleep(GATHER + PARTING)  # another thread is ending this process, but may hang in a store call
            self._end_alone(failure)
        with self._only_once():
            if not _within(STORE_ANSWER, lambda: self._board.cause()):
                self._end_alone(failure)
            last = threading.Timer(GRACE + PARTING, self._end_alone, [failure])
            last.daemon = True
            last.start()
            self._end(failure, ranks)

    def follow(self, cause: Failure) -> NoReturn:
        """End this rank because another rank has failed."""
        with self._only_once():
            self._follow(cause)

    def kill_all(self, number: signal.Signals) -> NoReturn:
        """End all ranks immediately because this rank received a second signal."""
        with self._only_once():
            rank = self._launch.rank
            board = self._board
            phase = self._status.phase_and_action()
            message = f"{board.name(rank)}: a second signal, {number.name}, in {phase}: ending at once"
            print(message, file=sys.stderr, flush=True)
            write_error_file(message)
            code = ExitCode.KILLED + number
            self._outcome.end(code, message)
            failure = Failure(rank, board.name(rank), phase, message, "", "", code)
            with suppress(RuntimeError):
                board.post_cause(failure)
                board.post_report(failure)
                # The store may be in this process, so wait until the other ranks have read the failure.
                board.wait(lambda: len(board.get_all("left")) >= self._launch.world_size - 1, PARTING)
            self._exit(code)

    def leave(self, message: str) -> NoReturn:
        """End all ranks before there is anything to save. The exit code requests a restart of the run."""
        with self._only_once():
            code = ExitCode.TO_BE_RESUMED
            board = self._board
            first = self._launch.rank == 0
            if first:
                print(message, file=sys.stderr, flush=True)
                self._outcome.end(code, message)
            write_error_file(message)
            with suppress(RuntimeError):
                # Ranks end only when all have reached this point. Rank 0 ends last, because it may host the store.
                board.come("leave")
                board.wait(lambda: board.all_came("leave"), PARTING)
                time.sleep(PERIOD if first else 0.0)
            self._exit(code)

    def _end_alone(self, failure: Failure) -> NoReturn:
        """Report the failure on this host and end the process, without exchanging messages with other hosts. Other
        hosts may still share files with this host."""
        self.reported = failure
        _within(1.0, lambda: self._outcome.end(failure.code, f"{failure.who}: {failure.title}"))
        if self._launch.local_rank == 0:
            tell_last(failure.text(), now=True, at=failure.at)
        else:
            write_error_file(failure.line(), time.time() + 1)
        self._exit(failure.code)

    def store_lost(self, error: RuntimeError) -> NoReturn:
        """End this rank because the process that hosts the store (the launcher or rank 0) has ended."""
        with self._only_once():
            title = str(error).partition("\n")[0]
            if self._signals.first_at is None and (lost := self._first_gone(title)):
                self._end_without_store(lost)
            if self._signals.first_at is None and self._launch.local_rank <= (self._launch.launcher == "srun"):
                what = f"the store of the ranks does not answer: {title}"
                who = "rank 0 or the launcher, which hosts the ranks' store"
                failure = Failure(
                    self._launch.rank,
                    who,
                    self._status.place(),
                    "",
                    what,
                    died(self.checkpoints, self.saved, self.memory()),
                )
                print(failure.text(), file=sys.stderr)
            self._exit(ExitCode.FAILED)

    @property
    def ending(self) -> bool:
        """True if some thread is already ending this process."""
        return self._ending.locked()

    @contextmanager
    def _only_once(self) -> Iterator[None]:
        """Ensure that only one thread ends the process: the first thread that enters this context, even if its failure
        report fails. Other threads wait until the process ends."""
        if not self._ending.acquire(blocking=False):
            while True:
                time.sleep(60)
        end_within(LAST_RESORT)
        try:
            yield
        except BaseException:
            traceback.print_exc()
            self._exit(ExitCode.FAILED)

    def _await_cause(self, error: BaseException) -> list[int]:
        """Wait for another rank to report the cause of `error`. Return the ranks that did not answer in time."""
        board = self._board
        try:
            before = board.get_all("beat")

            def silent() -> list[int]:
                after = board.get_all("beat")
                return [r for r, beat in before.items() if after.get(r) == beat and r != self._launch.rank]

            def known() -> bool:
                if board.cause() is not None or self.ending:
                    return True
                # After a timeout, no other report is expected if every rank answers or is suspended, so stop waiting.
                return hung(error) and all(board.state(rank) == "T" for rank in silent())

            board.wait(known, GRACE)
            return silent()
        except RuntimeError:
            return []

    def _end(self, failure: Failure, silent: Collection[int] = (), waited: bool = False) -> NoReturn:
        """Report the failure, unless another rank reports it, and exit. `silent` contains ranks that do not answer."""
        board, rank = self._board, self._launch.rank
        try:
            first = board.post_cause(failure)
            if first.reporter != rank:
                self._follow(first)
            self._dump()
            others = self._gather(silent)
            places = {rank: f"{standing.phase}, {standing.place}" for rank, standing in others.items()}
            if waited:
                failure = self._blamed(failure, silent, others | {rank: self._status.standing()})
            self._outcome.end(failure.code, f"{failure.who}: {failure.title}")
            self._deliver(failure, failure.text(places, self._stacks.folder))
            board.post_report(failure)
        except RuntimeError:  # the process that hosts the store has ended
            if waited and (lost := self._first_gone(failure.title)):
                self._end_without_store(lost)
            self._deliver(failure, failure.text())
            self._exit(failure.code)
        with suppress(RuntimeError):
            self._kill_silent(failure)
            # The store may be in this process, so end only after the other ranks have used the store.
            board.wait(lambda: len(board.get_all("left")) >= len(others), 1.0)
        self._exit(failure.code)

    def _first_gone(self, noticed: str) -> Failure | None:
        """Return the failure of rank 0 if its process hosted the store and is gone. `noticed` is the error message from
        which this rank learned that the process had ended."""
        board, launch = self._board, self._launch
        if launch.rank == 0 or launcher_has_store():
            return None
        here = board.known_neighbours().get(0)

        def gone() -> bool:
            return not here.state() if here is not None else store_refuses()

        if not board.wait(gone, STORE_ANSWER):  # wait: the process closes its connections before it ends
            return None
        who = board.name(0) if 0 in board.peers else f"rank 0 of {launch.world_size}"
        process = f"process {board.peers[0].pid}" if 0 in board.peers else "its process"
        what = f"{process} is gone, and with it the ranks' store, which it hosted{self._stacks.last_words(0)}\n"
        what += f"noticed by rank {launch.rank} in {self._status.place()}: {noticed}"
        phase = f"{board.first_phase or 'unknown'}, at its last sign of life"
        return Failure(launch.rank, who, phase, GONE, what, died(self.checkpoints, self.saved, self.memory()))

    def _end_without_store(self, failure: Failure) -> NoReturn:
        """End this rank when no store is left for sharing a failure report. One rank per host reports the failure."""
        rank, others = self._launch.rank, self._board.known_neighbours()
        if rank == min({rank, *others} - {0}):
            _within(1.0, lambda: self._outcome.end(failure.code, f"{failure.who}: {failure.title}"))
            self._deliver(failure, failure.text())
        else:
            self.reported = failure
            print(failure.line(), file=sys.stderr, flush=True)
        self._exit(failure.code)

    def _gather(self, silent: Collection[int]) -> dict[int, Standing]:
        """Collect the phase and line of code of each other rank that can still report them."""
        board = self._board
        gone = {rank for rank, peer in board.neighbours().items() if not peer.state()} | set(silent)
        board.wait(lambda: len(board.get_all("place")) >= self._launch.world_size - 1 - len(gone), GATHER)
        return board.read_all("place", Standing.from_json)

    def _blamed(self, failure: Failure, silent: Collection[int], standings: dict[int, Standing]) -> Failure:
        """If this rank failed while it waited for another rank, attribute the failure to that other rank."""
        board = self._board
        status = self._status
        rank = self._launch.rank
        limit = f" (the limit is {status.limit})" if status.error is not None and hung(status.error) else ""
        noticed = f"noticed by rank {rank} in {status.place()}: {failure.title}{limit}"
        if silent:
            who = ", ".join(map(board.name, silent))
            phases = [f"{board.last_phase(rank) or 'unknown'}, according to its last report" for rank in silent]
            stopped = [f"process {board.peers[r].pid} is stopped (SIGSTOP)" for r in silent if board.state(r) == "T"]
            what = "\n".join(["it stopped answering", *stopped, noticed, failure.what])
            return replace(failure, who=who, phase=phases[0], title="stopped answering", what=what).advised("stopped")
        found = status.analysis.blame(standings)
        if found is None:
            late = status.error.ranks if isinstance(status.error, LateRanksError) else ()
            return self._absent(failure, [rank for rank in late if rank not in standings], noticed)
        who = ", ".join(map(board.name, found.ranks))
        guilty = standings[found.ranks[0]]
        what = f"{found.why}\n{noticed}\nTraceback of rank {found.ranks[0]} (most recent call last):\n{guilty.stack}"
        return replace(failure, who=who, phase=guilty.phase, title=found.title, what=what).advised("collective")

    def _absent(self, failure: Failure, ranks: Collection[int], noticed: str) -> Failure:
        """Attribute the failure of a rank that waited at start-up to `ranks`, the ranks that do not answer."""
        if not ranks:
            return failure
        lines, names = list[str](), list[str]()
        for rank in ranks:
            peer = self._board.peer(rank)
            names.append(self._launch.name(peer.host, rank) if peer else f"rank {rank} of {self._launch.world_size}")
            if peer is None:
                lines.append(f"rank {rank} has not come")
            elif peer.namespace == self._board.me.namespace and peer.state() == "T":
                lines.append(f"rank {rank} has stopped answering: process {peer.pid} is stopped (SIGSTOP)")
            else:
                lines.append(f"rank {rank} has stopped answering")
        who, what = ", ".join(names), "\n".join([*lines, noticed])
        return replace(failure, who=who, title="did not come", what=what).advised("absent")

    def _follow(self, cause: Failure) -> NoReturn:
        board, self.reported = self._board, cause
        try:
            board.say("place", self._status.standing().to_json())
            self._dump()
            board.wait(lambda: board.report() is not None, GATHER + 2)
            if report := board.report():
                self.reported = cause = report
                self._echo(cause)
            elif self._launch.local_rank == 0:
                print(cause.text(), file=sys.stderr, flush=True)
            write_error_file(cause.line(), time.time() + 1)
            self._kill_silent(cause)
            self.left = True
            board.say("left")
            if START not in os.environ:  # no starter informs the launcher of the failure
                time.sleep(0.5)  # let the launcher notice the failed rank first
        except RuntimeError:
            write_error_file(cause.line(), time.time() + 1)
        self._exit(cause.code)

    def _echo(self, cause: Failure) -> None:
        """Print one line about a failure if only another host prints the report and torchrun prints none here."""
        elsewhere = cause.reporter not in self._board.neighbours() and self._launch.launcher == "torchrun"
        if self._launch.local_rank == 0 and elsewhere and restarts_left():
            print(cause.line(), file=sys.stderr, flush=True)

    def _kill_silent(self, cause: Failure) -> None:
        """Kill the ranks on this machine that cannot exit on their own, because they are suspended or stuck."""
        said = self._board.get_all("place")
        for rank, peer in self._board.neighbours().items():
            if rank not in said and peer.state() and rank != cause.reporter:
                os.kill(peer.pid, signal.SIGKILL)

    def _dump(self) -> None:
        self._stacks.write(
            f"{self._board.name(self._launch.rank)}: {self._status.place()}", self._status.analysis.write
        )

    def _deliver(self, failure: Failure, text: str) -> None:
        """Print the report as the last text on the screen."""
        self.reported = failure
        # If a process is gone, torchrun sends signals to the other processes, and then prints their reports.
        now = self._signals.first_at is not None and failure.title != GONE
        tell_last(text, now, failure.at)

    def _exit(self, code: int) -> NoReturn:
        end_within(LAST_RESORT)
        closing = [threading.Thread(target=close, daemon=True) for close in self.at_exit]
        for thread in closing:
            thread.start()
        until = time.monotonic() + 1.0
        for thread in closing:
            thread.join(max(0.0, until - time.monotonic()))
        end_children()
        flush_output()
        os._exit(code_for_launcher(code))


def end_within(seconds: float) -> None:
    """Print the stacks of all threads and exit with code 1 unless this process ends on its own within `seconds`.

    A second call has no effect. The process ends even if Python code no longer runs, because a C thread ends it. If the
    C thread hangs too, a timer signal ends the process.
    """
    if signal.getitimer(signal.ITIMER_REAL)[0] == 0.0:
        signal.setitimer(signal.ITIMER_REAL, seconds + PARTING)
        faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _within(seconds: float, call: Callable[[], object]) -> bool:
    """Run `call`, which may hang. Return True if `call` returns within `seconds` without a store error."""
    done = threading.Event()

    def run() -> None:
        with suppress(RuntimeError):
            call()
            done.set()

    threading.Thread(target=run, daemon=True).start()
    return done.wait(seconds)
