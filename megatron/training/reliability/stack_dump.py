"""Write the stacks of every rank into `stacks/` in the --save folder when the run fails."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from megatron.training.reliability.rank_store import out_of_memory_kills

MOST = 2000
"""Maximum number of characters of a crashed interpreter's output that a report shows."""


class StackDump:
    """File to which this rank writes the stacks of its threads. Until `open` is called, `write` does nothing. Without
    --save, `open` is never called."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._file: TextIO | None = None
        self._rank = 0
        self._kills = out_of_memory_kills()

    def open(self, folder: Path, rank: int) -> None:
        """Open the stack file, and make the interpreter write stacks to this file if the process crashes. Raises
        ValueError if the file cannot be written."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"rank-{rank:05d}.txt").open("w")
        except OSError as error:
            raise ValueError(
                f"--save {folder.parent}: rank {rank} cannot write there ({error}); name a folder that "
                "every rank can write"
            ) from error
        self.folder, self._rank = folder, rank
        faulthandler.enable(self._file)

    def write(self, title: str, beside: Callable[[Path, int], None]) -> None:
        """Write the stacks of all threads, and then call `beside(folder, rank)`, which may write further files. If a
        file cannot be written, for example because the disk is full, the error is ignored."""
        if self._file is None or self.folder is None:
            return
        with suppress(OSError):
            self._open_again_if_deleted()
            self._file.write(f"{title}\n")
            self._file.flush()
            faulthandler.dump_traceback(self._file)
            beside(self.folder, self._rank)

    def _open_again_if_deleted(self) -> None:
        """Reopen this rank's file if it was deleted or renamed during the run and the --save folder still exists."""
        assert self._file is not None and self.folder is not None
        path = Path(self._file.name)
        if path.exists() and os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
            return
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError:
            self.folder = None
            raise
        self._file = path.open("w")
        faulthandler.enable(self._file)

    def last_words(self, rank: int) -> str:
        """Describe why the process of another rank ended, from the kernel's count of out-of-memory kills and from the
        crash output of the rank's interpreter."""
        said = []
        if (kills := out_of_memory_kills()) > self._kills:
            said.append(f"the kernel's out-of-memory killer has ended {kills - self._kills} processes of this machine")
        path = self.folder / f"rank-{rank:05d}.txt" if self.folder is not None else None
        text = ""
        with suppress(OSError):  # the open-file limit may be reached
            text = path.read_text() if path is not None and path.exists() else ""
        if text.startswith("Fatal"):
            said.append(text.partition("\nExtension modules")[0][:MOST])
        return "".join(f"\n{each}" for each in said)
