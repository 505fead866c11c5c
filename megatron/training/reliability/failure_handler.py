"""How a rank ends by a failure: the first to fail reports for all, the others say where they stand and leave."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from megatron.training.reliability.failure_report import (
    ADVICE,
    Failure,
    hung,
    is_consequence,
    place_in,
    place_of,
    raised_in_message,
)
from megatron.training.reliability.flight_recorder import Entered, Group, last_entered, traces
from megatron.training.reliability.hang_analysis import Standing, blame
from megatron.training.reliability.launch import Launch, tell_last, write_error_file
from megatron.training.reliability.rank_store import Board, NoStoreError, out_of_memory_kills
from megatron.training.reliability.run_status import Outcome, code_for_launcher

GRACE = 3.0
"""Seconds that a consequence waits for its cause."""

GATHER = 2.0
"""Seconds in which the other ranks say where they were."""

WORDS = 2000
"""Characters of another process's last words."""


class Ending:
    """What one rank does when a rank has failed, itself or another."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.outcome = Outcome.from_environment()
        self.phase = "start-up"
        self.limit = ""
        """The flag, with its value, that says how long ranks may wait for one another in this phase."""

        self.actions: Any = None
        """What has the action being run as `.current`, and the rank whose message it waits for, where known."""

        self.groups: dict[str, Group] = {}
        """The process groups, once they are there."""

        self.at_exit: list[Callable[[], None]] = []
        """What to close when the process ends by a failure."""

        self._board: Board | None = None
        self._failing = threading.Lock()
        self._closed = threading.Event()
        self._signal_at: float | None = None
        self._main = threading.get_ident()
        self._stacks: TextIO | None = None
        self._error: BaseException | None = None
        self._meeting: Entered | None = None
        self._kills = out_of_memory_kills()

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all ranks because of an exception on this one."""
        if isinstance(error, NoStoreError):
            what = f"{error}\nwaited for {self.limit}"
            alone = Failure(self.launch.rank, self._name(), self.phase, "no store", what, ADVICE["no store"])
            tell_last(alone.text())
            self._exit(alone.code)
        if self._board is None:
            raise error
        self._error = error
        silent = self._await_cause(error) if is_consequence(error) else []
        self._only_once()
        failure = Failure.of(error, self.launch.rank, self._name(), self._phase())
        self._end(failure, silent, waited=is_consequence(error))

    # What the training thread and the watching one share.

    def _only_once(self) -> None:
        """Lets the first thread of this process end it; the other waits for that."""
        if not self._failing.acquire(blocking=False):
            while True:
                time.sleep(60)

    def _await_cause(self, error: BaseException) -> list[int]:
        """Gives a cause time to show up. Returns the ranks that did not answer in that time."""
        assert self._board is not None
        try:
            before = self._board.get_all("beat")

            def silent(board: Board) -> list[int]:
                return [rank for rank in _unchanged(before, board.get_all("beat")) if rank != self.launch.rank]

            def known(board: Board) -> bool:
                if board.cause() is not None or self._failing.locked():
                    return True
                # Ranks that are stopped, or that all live, have waited for one another: nothing more is to come.
                return hung(error) and all(self._state(rank) == "T" for rank in silent(board))

            self._wait(known, GRACE)
            return silent(self._board)
        except RuntimeError:
            return []

    def _end(self, failure: Failure, silent: Collection[int] = (), waited: bool = False) -> NoReturn:
        """Reports and ends, unless another rank already does. `silent`: ranks that will not say where they are."""
        board = self._board
        assert board is not None
        try:
            first = board.post_cause(failure)
            if first.reporter != self.launch.rank:
                self._follow(first)
            self._dump()
            others = self._gather(silent)
            places = {rank: f"{standing.phase}, {standing.place}" for rank, standing in others.items()}
            if waited:
                failure = self._blamed(failure, silent, others | {self.launch.rank: self._standing()})
            self.outcome.end(failure.code, f"{failure.who}: {failure.title}")
            self._deliver(failure, failure.text(places, self._folder()))
            board.store.set("told", failure.to_json())
        except RuntimeError:  # the store is gone
            self._deliver(failure, failure.text())
            self._exit(failure.code)
        with suppress(RuntimeError):
            self._kill_silent(failure)
            # The store may live in this process: it ends when the others have done with it.
            self._wait(lambda b: len(b.get_all("left")) >= len(others), 1.0)
        self._exit(failure.code)

    def _gather(self, silent: Collection[int]) -> dict[int, Standing]:
        """Where the other ranks stand that can still say it."""
        board = self._board
        assert board is not None
        gone = {rank for rank, peer in board.neighbours().items() if not peer.state()} | set(silent)
        self._wait(lambda b: len(b.get_all("place")) >= self.launch.world_size - 1 - len(gone), GATHER)
        return {rank: Standing.from_json(text) for rank, text in board.get_all("place").items()}

    def _blamed(self, failure: Failure, silent: Collection[int], standings: dict[int, Standing]) -> Failure:
        """The failure of a rank that waited, told as that of the rank it waited for."""
        board = self._board
        limit = f" (the limit is {self.limit})" if self._error is not None and hung(self._error) else ""
        assert board is not None
        noticed = f"noticed by rank {self.launch.rank} in {self._place()}: {failure.title}{limit}"
        if silent:
            who = ", ".join(map(self._name, silent))
            phases = [f"{board.last_phase(rank) or 'unknown'}, as it said last" for rank in silent]
            stopped = [f"process {board.peers[r].pid} is stopped (SIGSTOP)" for r in silent if self._state(r) == "T"]
            what = "\n".join(["it stopped answering", *stopped, noticed, failure.what])
            return replace(failure, who=who, phase=phases[0], title="stopped answering", what=what).advised("stopped")
        found = blame(standings)
        if found is None:
            return failure
        who = ", ".join(map(self._name, found.ranks))
        guilty = standings[found.ranks[0]]
        what = f"{found.why}\n{noticed}\nTraceback of rank {found.ranks[0]} (most recent call last):\n{guilty.stack}"
        return replace(failure, who=who, phase=guilty.phase, title=found.title, what=what).advised("collective")

    def _follow(self, cause: Failure) -> NoReturn:
        """Ends because another rank has failed."""
        board = self._board
        assert board is not None
        try:
            board.store.set(f"place/{self.launch.rank}", self._standing().to_json())
            self._dump()
            told = self._wait(lambda b: b.store.check(["told"]), GATHER + 2)
            if told:
                cause = Failure.from_json(board.get("told") or "")
            elif self.launch.local_rank == 0:
                print(cause.text(), file=sys.stderr, flush=True)
            write_error_file(cause.line(), 1)
            self._kill_silent(cause)
            board.store.set(f"left/{self.launch.rank}", "")
            time.sleep(0.5)  # the launcher hears of the failed rank first
        except RuntimeError:
            write_error_file(cause.line(), 1)
        self._exit(cause.code)

    def _kill_silent(self, cause: Failure) -> None:
        """Ends the processes of this machine that are stopped or stuck and cannot end themselves."""
        assert self._board is not None
        said = self._board.get_all("place")
        for rank, peer in self._board.neighbours().items():
            if rank not in said and peer.state() and rank != cause.reporter:
                os.kill(peer.pid, signal.SIGKILL)

    def _exit(self, code: int) -> NoReturn:
        closing = threading.Thread(target=lambda: [close() for close in self.at_exit], daemon=True)
        closing.start()
        closing.join(1.0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code_for_launcher(code))

    def _wait(self, condition: Callable[[Board], bool], seconds: float) -> bool:
        """Whether a condition came true in time."""
        assert self._board is not None
        deadline = time.monotonic() + seconds
        while not condition(self._board):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    # What is said.

    def _name(self, rank: int | None = None) -> str:
        rank = self.launch.rank if rank is None else rank
        host = socket.gethostname()
        if self._board is not None and rank in self._board.peers:
            host = self._board.peers[rank].host
        return f"rank {rank} of {self.launch.world_size} on {host}"

    def _state(self, rank: int) -> str:
        assert self._board is not None
        peer = self._board.neighbours().get(rank)
        return peer.state() if peer is not None else ""

    def _phase(self) -> str:
        """Phase, and within a step the micro-batch and the action of the schedule."""
        action = getattr(self.actions, "current", None)
        return self.phase if action is None else f"{self.phase}, micro-batch {action.microbatch}, action {action}"

    def _place(self) -> str:
        """Phase and line of code."""
        return f"{self._phase()}, {self._line()}"

    def _line(self) -> str:
        return (place_in(self._error) if self._error is not None else "") or place_of(self._main)

    def _standing(self) -> Standing:
        error = self._error
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
        else:
            frames = traceback.extract_stack(sys._current_frames().get(self._main))
        stack = "".join(traceback.format_list(frames))
        last_pending = error is not None and not raised_in_message(error)
        entered = last_entered(traces(), self.groups, last_pending) if self.groups else []
        if self._meeting is not None:
            entered.append(self._meeting)
        return Standing(self._phase(), self._line(), stack, tuple(entered), getattr(self.actions, "message_from", None))

    def _last_words(self, rank: int) -> str:
        """What is known of how another rank ended: what its interpreter wrote while it crashed, and the kernel."""
        said = []
        if (kills := out_of_memory_kills()) > self._kills:
            said.append(f"the kernel's out-of-memory killer has ended {kills - self._kills} processes of this machine")
        folder = self._folder()
        path = folder / f"rank-{rank:05d}.txt" if folder is not None else None
        text = path.read_text() if path is not None and path.exists() else ""
        if text.startswith("Fatal"):
            said.append(text.partition("\nExtension modules")[0][:WORDS])
        return "".join(f"\n{each}" for each in said)

    def _folder(self) -> Path | None:
        return Path(self._stacks.name).parent if self._stacks is not None else None

    def _dump(self) -> None:
        """Writes the stacks and the last collectives of this rank into the folder of the run, if its disk has room."""
        folder = self._folder()
        if self._stacks is None or folder is None:
            return
        with suppress(OSError):
            self._stacks.write(f"{self._name()}: {self._place()}\n")
            self._stacks.flush()
            faulthandler.dump_traceback(self._stacks)
            recorded = [trace for trace in traces() if trace.get("entries")]
            if recorded:
                (folder / f"collectives-{self.launch.rank:05d}.json").write_text(json.dumps(recorded))

    def _deliver(self, failure: Failure, text: str) -> None:
        """Prints the report last."""
        # torchrun sends a signal to the others when a process is gone, and prints what they have said of that.
        tell_last(text, now=self._signal_at is not None and failure.advice != ADVICE["died"])


def _unchanged(before: dict[int, str], after: dict[int, str]) -> list[int]:
    return [rank for rank, beat in before.items() if after.get(rank) == beat]
