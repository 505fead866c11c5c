"""Exit codes, the status file for the script that launched a run, and the event log of a run. This module does not
import torch.

Launchers do not forward exit codes: torchrun replaces every nonzero code of a worker with 1, and srun kills the
processes on the other nodes after a nonzero code. If OUTCOME_FILE is set in the environment, the status of the run is
therefore written to this file, as lines of `key=value`:

    name    RUNNING, then a name of `ExitCode`; a run that is killed leaves RUNNING
    why     the reason, in one line
    save    absolute path of --save; empty without it
    load    absolute path of --load; empty without it

The file OUTCOME_FILE.asked exists if a signal arrived before the ranks could receive signals. Launchers receive exit
code 0 for TO_BE_RESUMED, because they treat every other code as a failure.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path, PurePath

from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.file_storage import located, resolved, storage_of
from megatron.core.dist_checkpointing.path_kind import EVENTS
from megatron.core.fsync import whole_file
from megatron.training.reliability.launch import Launch
from megatron.training.reliability.url_credentials import redacted
from megatron.training.reliability.visible_text import visible

VARIABLE = "OUTCOME_FILE"


@dataclass
class Outcome:
    """Writer of the status file, which reports the outcome of the run. Writes are atomic unless the file is a device,
    pipe or link. If `file` is None, the methods do nothing."""

    file: Path | None = None
    folders: dict[str, str] = field(default_factory=dict)
    recorded: bool = True
    """True to record the end of the run as an event in the --save folder; False if the folder may belong to another
    run."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Outcome:
        name = (os.environ if environ is None else environ).get(VARIABLE)
        return cls(Path(name) if name else None)

    @property
    def asked(self) -> bool:
        """True if a signal requested a stop before the ranks started."""
        return self.file is not None and self.file.with_name(f"{self.file.name}.asked").exists()

    def begin(self, save: str | None, load: str | None, write: bool) -> None:
        """Set the folders of --save and --load that the status file names. If `write` is True, also write the status
        RUNNING."""
        self.folders = {
            name: str(resolved(located(path))) if path else "" for name, path in (("save", save), ("load", load))
        }
        if write:
            self._write("RUNNING", "")

    def end(self, code: int, why: str = "") -> None:
        """Write the name of the `ExitCode` with which the run ends. If a signal ended the run, `code` is KILLED plus
        the signal number."""
        name = ExitCode(min(code, ExitCode.KILLED)).name
        self._write(name, why)
        if self.recorded:
            record_event(self.folders.get("save"), "end", name=name, why=" ".join(why.split()))

    def _write(self, name: str, why: str) -> None:
        if self.file is None:
            return
        lines = {"name": name, "why": redacted(" ".join(why.split())), **self.folders}
        try:
            with whole_file(self.file) as new:
                new.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
        except OSError as error:  # the run continues
            print(visible(f"cannot write {VARIABLE} {self.file}: {error}"), flush=True)


@contextmanager
def early_end_told(launch: Launch) -> Iterator[None]:
    """Write the status file if an error in the flags ends the run before it starts. One process on every host writes
    the file, because OUTCOME_FILE may be on a local disk."""
    try:
        yield
    except SystemExit as ended:
        if launch.local_rank == 0 and isinstance(ended.code, int):
            Outcome.from_environment().end(ended.code, "the configuration cannot run" if ended.code else "")
        raise


def code_for_launcher(code: int, environ: Mapping[str, str] | None = None) -> int:
    """Return the exit code for the launcher. The exit code of a stopped run that is to be resumed later
    (`TO_BE_RESUMED`) becomes 0 in two cases: the launching script reads the status from OUTCOME_FILE instead, or
    torchrun has restarts left. In the second case, torchrun would restart the run after any other code."""
    environ = os.environ if environ is None else environ
    restarts = [environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if code == ExitCode.TO_BE_RESUMED and (environ.get(VARIABLE) or int(restarts[0]) < int(restarts[1])):
        return ExitCode.DONE
    return code


class ExitCode(IntEnum):
    """Exit code of every process of a run. Under torchrun, these are the exit codes of the workers."""

    DONE = 0
    """The run trained to the end, or to the stop set by --exit-interval, --exit-duration-in-mins or an `exit` file."""

    FAILED = 1
    """A rank failed. The failure report names the rank."""

    BAD_CONFIGURATION = 2
    """A flag, or a file that a flag names, must be corrected first; a restart does not help."""

    CALLBACK_FAILED = 3
    """The run ended as with DONE, but the `on_end` method of a callback raised an exception."""

    TO_BE_RESUMED = 75
    """The run stopped after saving, because of a signal or the end of the SLURM job. Starting the same command again
    resumes the run."""

    KILLED = 128
    """A second signal ended the run immediately. The exit code is 128 plus the signal number."""


def _open_at_once(path: str, mode: int) -> int:
    """Open a file without waiting. For a named pipe without a reader, this function raises OSError, whereas `open`
    would wait for a reader."""
    return os.open(path, mode | os.O_NONBLOCK, 0o666)


def record_event(save: str | Path | None, event: str, **facts: object) -> None:
    """Append an event to the event log in the --save folder. This function does nothing if there is no --save, if the
    folder does not exist yet, or if the disk is full."""
    root = located(save) if save else None
    if root is None or (isinstance(root, Path) and not root.is_dir()):
        return
    line = redacted(json.dumps({"time": round(time.time(), 3), "event": event, **facts}))
    if not isinstance(root, Path):
        with suppress(OSError):
            storage_of(root).append(root / EVENTS, f"{line}\n".encode())
        return
    with suppress(OSError), open(root / EVENTS, "a", encoding="utf-8", opener=_open_at_once) as file:
        file.write(line + "\n")


def recorded_events(save: PurePath | None) -> list[dict[str, object]]:
    """Return the events in the --save folder of a run, oldest first; damaged lines are skipped. The list is empty
    without --save."""
    return list(each_event(save))


def each_event(save: PurePath | None) -> Iterator[dict[str, object]]:
    """Yield the events that `recorded_events` returns, one at a time, because a long run has many events."""
    if save is None:
        return
    with suppress(OSError), storage_of(save).open(save / EVENTS) as file:
        yield from _parsed(line.decode(errors="replace") for line in file)


def parse_events(text: str) -> list[dict[str, object]]:
    """Parse the text of a `run_events.jsonl` file to events; damaged lines are skipped."""
    return list(_parsed(text.splitlines()))


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        try:
            event = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
