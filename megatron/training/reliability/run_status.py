"""Exit codes, the status file of a run for the script that started it, and the events of a run. This module does not
import torch.

Launchers lose exit codes: torchrun turns every code of a worker except 0 into 1, and srun kills the other nodes on a
nonzero code. So if OUTCOME_FILE is set in the environment, the status of the run is written to that file, as lines of
`key=value`:

    name    RUNNING, then a name of `ExitCode`; a run that is killed leaves RUNNING
    why     the reason, in one line
    save    absolute path of --save; empty without it
    load    absolute path of --load, likewise

If the file OUTCOME_FILE.asked exists when the ranks start, a signal came before they could receive it. To launchers,
which know no other successful end, TO_BE_RESUMED is exit code 0.
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
    """Writes the status file, atomically unless it is a device, pipe or link. Without a file it does nothing."""

    file: Path | None = None
    folders: dict[str, str] = field(default_factory=dict)
    recorded: bool = True
    """True if the end is an event of the run in --save: not if another run has that folder."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Outcome:
        name = (os.environ if environ is None else environ).get(VARIABLE)
        return cls(Path(name) if name else None)

    @property
    def asked(self) -> bool:
        """True if the run is asked to stop before its start."""
        return self.file is not None and self.file.with_name(f"{self.file.name}.asked").exists()

    def begin(self, save: str | None, load: str | None, write: bool) -> None:
        """Remember the checkpoint folders and, with `write`, writes that the run is RUNNING."""
        self.folders = {
            name: str(resolved(located(path))) if path else "" for name, path in (("save", save), ("load", load))
        }
        if write:
            self._write("RUNNING", "")

    def end(self, code: int, why: str = "") -> None:
        """Write the code of `ExitCode` that the run ends with; KILLED may have a signal's number added."""
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
    """Write the status of a run that its flags end before it starts, on each host, as OUTCOME_FILE may be its own."""
    try:
        yield
    except SystemExit as ended:
        if launch.local_rank == 0 and isinstance(ended.code, int):
            Outcome.from_environment().end(ended.code, "the configuration cannot run" if ended.code else "")
        raise


def code_for_launcher(code: int, environ: Mapping[str, str] | None = None) -> int:
    """The exit code of the process. It is 0 for a run to be resumed if OUTCOME_FILE informs the script, or if torchrun
    has restarts left: torchrun would treat another code as a failure and restart a run that was asked to stop."""
    environ = os.environ if environ is None else environ
    restarts = [environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if code == ExitCode.TO_BE_RESUMED and (environ.get(VARIABLE) or int(restarts[0]) < int(restarts[1])):
        return ExitCode.DONE
    return code


class ExitCode(IntEnum):
    """Exit code of every process of a run. Under torchrun these are the codes of its workers."""

    DONE = 0
    """Trained to the end, or as far as --exit-interval, --exit-duration-in-mins or an `exit` file asked."""

    FAILED = 1
    """A rank failed; the report names it."""

    BAD_CONFIGURATION = 2
    """A flag, or a file that a flag names, must be corrected first: a restart does not help."""

    CALLBACK_FAILED = 3
    """As DONE, and saved, but a callback raised in `on_end`."""

    TO_BE_RESUMED = 75
    """Stopped by a signal or the end of the SLURM job, after saving: the same command resumes the run."""

    KILLED = 128
    """Plus the number of the second signal, which ended the process at once."""


def _open_at_once(path: str, mode: int) -> int:
    """Open a file; raises OSError for a named pipe that nobody reads, for which `open` would wait."""
    return os.open(path, mode | os.O_NONBLOCK, 0o666)


def record_event(save: str | Path | None, event: str, **facts: object) -> None:
    """Add a line. Without --save, before its folder exists, and on a full disk it does nothing."""
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
    """The events of a run in its --save folder, oldest first; damaged lines are skipped. None without a folder."""
    return list(each_event(save))


def each_event(save: PurePath | None) -> Iterator[dict[str, object]]:
    """Yield the events of `recorded_events` one by one, because a long run has many."""
    if save is None:
        return
    with suppress(OSError), storage_of(save).open(save / EVENTS) as file:
        yield from _parsed(line.decode(errors="replace") for line in file)


def parse_events(text: str) -> list[dict[str, object]]:
    """The events in the text of a `run_events.jsonl`; damaged lines are skipped."""
    return list(_parsed(text.splitlines()))


def _parsed(lines: Iterable[str]) -> Iterator[dict[str, object]]:
    for line in lines:
        try:
            event = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict):
            yield event
