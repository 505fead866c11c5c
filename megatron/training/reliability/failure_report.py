"""Failure report of a run: root cause, rank, phase, traceback and advice. This module uses no process groups."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import time
import tomllib
import traceback
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import torch

from megatron.core.dist_checkpointing.file_storage import located
from megatron.core.dist_checkpointing.path_kind import is_foreign_model, latest_text
from megatron.core.dist_checkpointing.storage import CheckpointError
from megatron.core.fsync import NO_ROOM
from megatron.training.config.run_config import CheckpointConfig
from megatron.training.extensions import place_in_extension
from megatron.training.reliability.launch import restarts_left
from megatron.training.reliability.run_status import ExitCode
from megatron.training.reliability.visible_text import visible

PACKAGE, RELIABILITY = str(Path(__file__).parents[2]), str(Path(__file__).parent)
RULE = "=" * 60

CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|timed out|time-?out|gloo|nccl|failed to (recv|send)",
    re.IGNORECASE,
)
"""Pattern of error messages that another rank's failure may have caused."""

ADVICE: dict[str, str] = tomllib.loads(Path(__file__).with_name("failure_advice.toml").read_text(encoding="utf-8"))
"""Advice for the user, keyed by the kind of failure. `{again}` is replaced with the result of `start_again`."""

OPEN_FILES = {errno.EMFILE, errno.ENFILE}
TOO_MANY = os.strerror(errno.EMFILE).lower()
ENOUGH = 65536
"""Limit on the number of open files that is sufficient for any run."""

GONE = "process is gone"
"""Title of the failure report if a process has ended without a report."""


@dataclass(frozen=True)
class Failure:
    """Root cause of a failed run. Ranks exchange instances of this class as JSON."""

    reporter: int
    """Rank that prints the report."""

    who: str
    """Name of the failed rank, such as `rank 3 of 8 on HOST`."""

    phase: str
    title: str
    """Short title for one-line messages."""

    what: str
    """Traceback, or a sentence that describes the failure."""

    advice: str
    code: int = ExitCode.FAILED
    at: float = field(default_factory=time.time)
    """Time of the failure in seconds since 1970. If a process is gone, this is the time of its last sign of life."""

    @classmethod
    def of(
        cls,
        error: BaseException,
        rank: int,
        who: str,
        phase: str,
        options: CheckpointConfig,
        saved: int | None = None,
        memory: str = "",
    ) -> Failure:
        """Create the report of an exception.

        Args:
            error: The exception.
            rank: Rank that prints the report.
            who: Name of the failed rank.
            phase: Phase of the run.
            options: Checkpoint flags of the run.
            saved: Last saved iteration.
            memory: Description of a state in memory, as for `start_again`.
        """
        again = start_again(options, saved, memory)
        title = "".join(traceback.format_exception_only(error)).splitlines()[0]
        if is_of_open_files(error):
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            advice = ADVICE["open files"].format(limit=limit, how=_more_open_files(), again=again)
            return cls(rank, who, phase, title, "".join(traceback.format_exception(error)), advice)
        if is_users(error):
            return cls(rank, who, phase, title, str(error), "", ExitCode.BAD_CONFIGURATION)
        if hasattr(error, "advice"):  # an error with advice needs no traceback
            return cls(rank, who, phase, title, str(error), str(error.advice))
        if is_of_disk(error):
            why = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
            return cls(rank, who, phase, title, why, ADVICE["disk"].format(again=again))
        what = "".join(traceback.format_exception(error))
        if is_out_of_memory(error):
            return cls(rank, who, phase, title, what, ADVICE["memory"])
        if "deterministic implementation" in str(error):
            return cls(rank, who, phase, title, what, ADVICE["kernel"])
        if is_consequence(error):
            return cls(rank, who, phase, title, what, ADVICE["collective"] + perhaps_open_files())
        _, own = place_in_extension(error) or (None, None)
        place = f" at {own}, in the extension," if own else ""
        advice = ADVICE["error"].format(place=place, again=again)
        return cls(rank, who, phase, title, what, advice + perhaps_open_files())

    def advised(self, kind: str) -> Failure:
        """Return a copy of this failure with the advice for failures of the given kind."""
        return replace(self, advice=ADVICE[kind])

    def text(self, others: dict[int, str] | None = None, stacks: Path | None = None) -> str:
        """Return the printed report. `others` contains the lines of code that the other ranks execute. The report of a
        configuration error omits these lines."""
        if self.code == ExitCode.BAD_CONFIGURATION:
            return visible(f"This configuration cannot run ({self.phase}):\n  " + self.what.replace("\n", "\n  "))
        lines = [RULE, f"RUN FAILED: {self.who}", f"phase: {self.phase}", self.what.rstrip()]
        lines += [f"{ranks}: {place}" for place, ranks in _grouped(others or {}).items()]
        if stacks is not None:
            lines.append(f"stacks of all ranks: {stacks}")
        unless = " if the ranks are not started again automatically" if restarts_left() else ""
        return visible("\n".join([*lines, f"what to do{unless}: {self.advice}", RULE]))

    def line(self) -> str:
        """Return the line that the other ranks print when they end because of this failure."""
        return visible(f"ended because {self.who} failed ({self.phase}): {self.title}")


class LateRanksError(TimeoutError):
    """Raised if some ranks have not finished a start-up phase in time."""

    def __init__(self, ranks: Collection[int], phase: str, limit: str) -> None:
        self.ranks = ranks
        named = ", ".join(map(str, ranks))
        super().__init__(f"timed out: these ranks did not complete {phase} within {limit}: {named}")


def _grouped(places: dict[int, str]) -> dict[str, str]:
    """Group ranks by the line of code that they execute. Return a dict from each line to a text such as `ranks 0, 1`.
    The lines are sorted by number of ranks, in descending order."""
    ranks: dict[str, list[int]] = {}
    for rank, place in sorted(places.items()):
        ranks.setdefault(place, []).append(rank)
    ordered = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return {place: ("rank " if len(who) == 1 else "ranks ") + ", ".join(map(str, who)) for place, who in ordered}


def start_again(options: CheckpointConfig, saved: int | None = None, memory: str = "") -> str:
    """Explain how the run continues after a failure.

    The run may continue from a state in memory, from the checkpoint that the same command loads, or from the start. If
    there is a checkpoint that this command does not load, the explanation names it. `memory` describes the state in
    memory; empty if there is none. `saved` is the run's last saved iteration.
    """
    foreign = options.load is not None and is_foreign_model(options.load)
    flag, folder = ("--save", options.save) if foreign else ("--load", options.load)
    said, anew = "start the same command again", options.anew
    if memory:
        return f"{said} {memory}"
    if folder and not anew and latest_text(located(folder)):
        return f"{said}: it resumes from the latest checkpoint in {flag} {folder}"
    if options.save and latest_text(located(options.save)):
        without = f" and without {'--finetune' if options.finetune else '--reset-iteration'}" if anew else ""
        return f"{said} with --load {options.save}{without}: it resumes from the latest checkpoint there"
    if saved is not None:  # this run saved a checkpoint that is gone: its disk was unmounted or its folder deleted
        there = "" if folder == options.save and not anew else f" with --load {options.save}"
        return f"mount or restore --save {options.save}, where this run saved iteration {saved}; then {said}{there}"
    return f"{said}: it begins where this run began, as there is no checkpoint"


def died(options: CheckpointConfig, saved: int | None = None, memory: str = "") -> str:
    """Return the advice to print if a process ended without a report. `start_again` describes the arguments."""
    return ADVICE["died"].format(again=start_again(options, saved, memory)) + perhaps_open_files()


MANY_OPEN = 0.75
"""Fraction of the limit on open files. If a process has more open files, the limit may have caused its failure."""


def perhaps_open_files() -> str:
    """Return advice for a failure that the open-file limit may have caused. Return an empty text if the number of open
    files is far below the limit.

    When a file cannot be opened, libraries may report a different error, and gloo even aborts the process. The
    surviving ranks, which call this function, have about as many open files as the aborted process.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd")) - 1
    except OSError as error:
        used = limit if error.errno in OPEN_FILES else 0
    if used < MANY_OPEN * limit:
        return ""
    return ADVICE["many open files"].format(used=used, limit=limit, how=_more_open_files())


def _more_open_files() -> str:
    """Return advice for raising the open-file limit."""
    limit, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH if hard == resource.RLIM_INFINITY else min(hard, ENOUGH)
    return ADVICE["soft limit"].format(more=most) if most > limit else ADVICE["hard limit"].format(more=ENOUGH)


def is_users(error: BaseException) -> bool:
    """Return True if a wrong value from the user caused the error, that is, if code of this package raised a
    ValueError."""
    if not isinstance(error, ValueError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(PACKAGE)


def is_consequence(error: BaseException) -> bool:
    """Return True if another rank's failure may have caused this error."""
    if is_of_open_files(error):
        return False  # the cause is the limit of this process, not another rank
    return isinstance(error, RuntimeError | OSError) and bool(CONSEQUENCE.search(str(error)))


def is_of_open_files(error: BaseException | None) -> bool:
    """Return True if this process or the system reached its open-file limit. Some libraries report this limit only in
    the text of their errors."""
    while error is not None:
        if (isinstance(error, OSError) and error.errno in OPEN_FILES) or TOO_MANY in str(error).lower():
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


def is_of_disk(error: BaseException) -> bool:
    """Return True if the error means that a file could not be written: a save has failed after all attempts, or the
    disk had no space for the file that the error names."""
    if isinstance(error, CheckpointError):
        return isinstance(error.__cause__, (OSError, type(None))) and not is_consequence(error)
    return isinstance(error, OSError) and error.errno in NO_ROOM and error.filename is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a device or the host ran out of memory. If the host runs out of memory, torch raises a plain
    RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def hung(error: BaseException) -> bool:
    """Return True if the error is a timeout of ranks that waited for each other, and not the result of a rank that
    ended."""
    return is_consequence(error) and bool(re.search(r"time-?out|timed out", str(error), re.IGNORECASE))


def place_in(error: BaseException) -> str:
    """Return the innermost line of this package in an error's traceback."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""


def place_of(thread_id: int) -> str:
    """Return the innermost line of this package's code that a thread of this process executes. Lines of the code in
    `megatron/training/reliability` are skipped."""
    frame: FrameType | None = sys._current_frames().get(thread_id)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(RELIABILITY):
            return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "outside of the package"
