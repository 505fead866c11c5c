"""What became of a run, in a file for the script that started it. No torch.

torchrun makes 1 of every exit code of its workers that is not 0, and srun ends the other nodes for one. So where
OUTCOME_FILE is set in the environment, the file of that name tells how the run stands, in lines of `key=value`:

    name    RUNNING, then a name of `ExitCode`; what ends without a word stays RUNNING
    why     in one line
    save    the folder of --save, from the root; empty without one
    load    the folder of --load, likewise

and a file of that name and `.asked` that is there when the ranks start is a signal that came before they could see it.
TO_BE_RESUMED is the code 0 to launchers, who know no other peaceful end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from megatron.training.reliability.launch import Launch

VARIABLE = "OUTCOME_FILE"


@dataclass
class Outcome:
    """The file, written at once by whoever knows how the run stands. Without a file it does nothing."""

    file: Path | None = None
    folders: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Outcome:
        name = (os.environ if environ is None else environ).get(VARIABLE)
        return cls(Path(name) if name else None)

    @property
    def asked(self) -> bool:
        """Whether the run is to end before it has begun."""
        return self.file is not None and self.file.with_name(f"{self.file.name}.asked").exists()

    def begin(self, save: str | None, load: str | None, write: bool) -> None:
        """Tells that the run has begun, where its checkpoints are, and, with `write`, that it is running."""
        self.folders = {
            name: str(Path(path).resolve()) if path else "" for name, path in (("save", save), ("load", load))
        }
        if write:
            self._write("RUNNING", "")

    def end(self, code: int, why: str = "") -> None:
        """Tells with which code of `ExitCode` the run ends, KILLED plus a signal's number included."""
        self._write(ExitCode(min(code, ExitCode.KILLED)).name, why)

    def _write(self, name: str, why: str) -> None:
        if self.file is None:
            return
        lines = {"name": name, "why": " ".join(why.split()), **self.folders}
        new = self.file.with_name(f"{self.file.name}.{os.getpid()}")
        try:
            new.write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
            new.replace(self.file)
        except OSError as error:  # the run goes on, and to its own end
            print(f"cannot write {VARIABLE} {self.file}: {error}", flush=True)


@contextmanager
def early_end_told(launch: Launch) -> Iterator[None]:
    """Tells of a run that ends before it begins, for what its flags say."""
    try:
        yield
    except SystemExit as ended:
        if launch.rank == 0 and isinstance(ended.code, int):
            Outcome.from_environment().end(ended.code, "the configuration cannot run" if ended.code else "")
        raise


def code_for_launcher(code: int, environ: Mapping[str, str] | None = None) -> int:
    """The exit code of the process. 0 for a run to be resumed if OUTCOME_FILE says so, or if torchrun has restarts
    left: it would take another code for a failure, and train on where an end was asked for."""
    environ = os.environ if environ is None else environ
    restarts = [environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if code == ExitCode.TO_BE_RESUMED and (environ.get(VARIABLE) or int(restarts[0]) < int(restarts[1])):
        return ExitCode.DONE
    return code


class ExitCode(IntEnum):
    """The code with which every process of a run ends. Under torchrun these are the codes of its workers."""

    DONE = 0
    """Trained to the end, or as far as --exit-interval, --exit-duration-in-mins or an `exit` file asked."""

    FAILED = 1
    """A rank failed; the report names it."""

    BAD_CONFIGURATION = 2
    """A flag, or a file that one names, has to be corrected first: starting again does not help."""

    TO_BE_RESUMED = 75
    """Ended by a signal or the end of the SLURM job, after saving: the same command goes on."""

    KILLED = 128
    """Plus the number of a second signal, which ended the process at once."""
