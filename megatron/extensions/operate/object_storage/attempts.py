"""Checkpoints in object storage. Each attempt to write a checkpoint writes separate objects. This module does not
import torch.

A store may execute a request long after the process that sent the request has died, or after the process has repeated
the request. Therefore, each attempt to write the checkpoint `iter_0000100` uses its own subfolder, such as
`iter_0000100/attempt-5b0ea3c1d2f4`. The first line of the object `iter_0000100/published.txt` names the attempt that is
the valid checkpoint. The second line of `published.txt` names the attempt that is in progress. A process writes
`published.txt` when it begins an attempt, and again when the attempt is complete. Both writes of `published.txt` fail
if another process has changed the object in the meantime. Therefore, a late request of an earlier attempt cannot change
`published.txt`. Such a request can only write to the subfolder of its own attempt. When a process saves the next
checkpoint, it deletes all subfolders that `published.txt` does not name.

Code that reads a checkpoint uses the same paths as for a checkpoint on a disk. For example, reading
`iter_0000100/metadata.json` returns the content of `metadata.json` in the subfolder of the published attempt. Folders
that other programs read, such as Hugging Face exports, do not use attempts. A folder without attempts contains the file
`.unfinished` until the folder is complete. In checkpoints that earlier versions of this program wrote, the files are
also directly in the checkpoint folder.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import PurePath
from typing import NamedTuple

from megatron.core.dist_checkpointing.file_storage import UNFINISHED
from megatron.extensions.operate.object_storage.fsspec_storage import FsspecStorage

PUBLISHED = "published.txt"
ATTEMPT = "attempt-"
CLAIMS = 3
"""Maximum number of times that a process tries to begin an attempt. An attempt cannot begin if another process changes
the object `PUBLISHED` of the checkpoint at the same time."""

CHECKPOINT = re.compile(r"iter_\d+")
"""Pattern that matches the names of checkpoint folders. Only these folders contain attempts."""


class Begun(NamedTuple):
    """Unfinished checkpoint of this process: the process has begun to write the checkpoint, but has not published it
    yet."""

    folder: PurePath
    mark: bytes
    """Content of the checkpoint's object `PUBLISHED` (`published.txt`) since this attempt began. The attempt is
    published only if the content is still the same."""


class AttemptStorage(FsspecStorage):
    """Object storage in which each attempt to write a checkpoint uses its own subfolder."""

    def __init__(self, scheme: str) -> None:
        super().__init__(scheme)
        self._current: dict[PurePath, str] = {}
        """Maps a checkpoint folder to the name of the attempt that `published.txt` declares valid; the name is empty if
        there is no valid attempt."""

        self._begun: dict[PurePath, Begun] = {}
        self._cleaned = set[PurePath]()

    def names(self, folder: PurePath) -> list[str]:
        attempt = self._attempt(folder) if CHECKPOINT.fullmatch(folder.name) else ""
        return super().names(folder / attempt if attempt else folder)

    def size(self, path: PurePath) -> int | None:
        found = super().size(path)
        return super().size(path) if found is None and self._has_moved(path) else found

    def read(self, path: PurePath, start: int = 0, length: int | None = None) -> bytes:
        try:
            return super().read(path, start, length)
        except FileNotFoundError:
            if not self._has_moved(path):
                raise
            return super().read(path, start, length)

    def scratch(self, final: PurePath) -> PurePath:
        """Return the folder in which to write the files of the checkpoint `final`. The folder is the subfolder of an
        attempt if this process has begun an attempt for `final`, and `final` otherwise."""
        return self._begun[final].folder if final in self._begun else final

    def begin(self, final: PurePath, keeps_names: bool = False) -> None:
        if keeps_names or not CHECKPOINT.fullmatch(final.name):
            super().begin(final)
            self._current[final] = ""
            return
        self._begun[final] = self._claim(final, final / f"{ATTEMPT}{os.urandom(6).hex()}")
        if (attempt := self._attempt(final)) or not self.finished(final):
            self._remove_others(final, attempt)
        for name in self.names(final.parent):
            if CHECKPOINT.fullmatch(name) and name != final.name:
                self._clean(final.parent / name)
        self._abort_uploads(final)

    def _claim(self, final: PurePath, folder: PurePath) -> Begun:
        """Begin an attempt to write a checkpoint. After this call, no earlier attempt can be published."""
        for left in range(CLAIMS - 1, -1, -1):
            before = self.content(final / PUBLISHED)
            self._current[final] = _published(before)
            mark = f"{_published(before)}\n{folder.name}".encode()
            try:
                self.replace(final / PUBLISHED, mark, before)
                break
            except FileExistsError:  # another process has replaced the object since it was read
                if not left:
                    raise
        return Begun(folder, mark)

    def publish(self, final: PurePath) -> None:
        if final not in self._begun:
            super().publish(final)
            return
        attempt, mark = self._begun[final]
        self.replace(final / PUBLISHED, f"{attempt.name}\n".encode(), mark)
        del self._begun[final]
        self._current[final] = attempt.name
        with suppress(OSError):  # if this fails, the old attempts take up space until the next save deletes them
            self._remove_others(final, attempt.name)

    def finished(self, final: PurePath) -> bool:
        if not CHECKPOINT.fullmatch(final.name):
            return super().finished(final)
        if self._attempt(final, again=True):
            return True
        found = super().names(final)
        return UNFINISHED not in found and any(not name.startswith((ATTEMPT, PUBLISHED)) for name in found)

    def discard(self, final: PurePath) -> None:
        if (begun := self._begun.pop(final, None)) is None:
            super().discard(final)
        elif (
            begun.mark.startswith(b"\n") and self.content(final / PUBLISHED) == begun.mark and not self.finished(final)
        ):
            self.withdraw(final)
        elif self._attempt(final, again=True) != begun.folder.name:
            with suppress(FileNotFoundError):
                self.remove(begun.folder)

    def withdraw(self, final: PurePath) -> None:
        if CHECKPOINT.fullmatch(final.name) and self._attempt(final, again=True):
            with suppress(FileNotFoundError):
                self.remove(final / PUBLISHED)
            self._current[final] = ""
        super().withdraw(final)

    def _clean(self, checkpoint: PurePath) -> None:
        """Delete leftover files from a checkpoint's folder. Such files remain if a process was killed while it was
        writing a checkpoint. Each process cleans the folder of a published checkpoint only once."""
        if not self.finished(checkpoint):
            self.withdraw(checkpoint)
        elif checkpoint not in self._cleaned and (attempt := self._attempt(checkpoint)):
            self._remove_others(checkpoint, attempt)
        self._cleaned.add(checkpoint)

    def _remove_others(self, checkpoint: PurePath, attempt: str) -> None:
        for name in super().names(checkpoint):
            if name not in (attempt, PUBLISHED):
                with suppress(FileNotFoundError):
                    self._remove(checkpoint / name, super()._place(checkpoint / name))

    def _place(self, path: PurePath) -> str:
        folder = path.parent
        if _may_be_of_an_attempt(path) and (attempt := self._attempt(folder)):
            path = folder / attempt / path.name
        return super()._place(path)

    def _attempt(self, checkpoint: PurePath, again: bool = False) -> str:
        """Return the name of the published attempt to write a checkpoint; empty if there is none. The name is read from
        the store if it is not yet known, or if `again` is True."""
        if again or checkpoint not in self._current:
            self._current[checkpoint] = _published(self.content(checkpoint / PUBLISHED))
        return self._current[checkpoint]

    def _has_moved(self, path: PurePath) -> bool:
        """Return True if the published attempt of a checkpoint has changed since this process last read the name of the
        attempt."""
        if not _may_be_of_an_attempt(path):
            return False
        return self._attempt(path.parent) != self._attempt(path.parent, again=True)


def _published(content: bytes | None) -> str:
    """Parse the content of the object `PUBLISHED`, and return the name of the published attempt; empty if there is
    none."""
    text = (content or b"").decode(errors="replace").partition("\n")[0].strip()
    return text if re.fullmatch(rf"{ATTEMPT}\w+", text) else ""


def _may_be_of_an_attempt(path: PurePath) -> bool:
    if not CHECKPOINT.fullmatch(path.parent.name):
        return False
    return path.name not in (PUBLISHED, UNFINISHED) and not path.name.startswith(ATTEMPT)
