"""Random identifier of the run in a --save folder. Copies in memory contain the identifier of the run that they belong
to.

Copies outlive the ranks. Copies may also outlive the folder, because a user may delete the folder or replace it with
the folder of another run. Therefore, a run that does not resume from copies writes a new random identifier to
SAVE/peer_copies_id before its first step. All copies of the run contain this identifier. A run that resumes from copies
keeps the identifier. A run without --peer-copies deletes SAVE/peer_copies_id. Copies are never loaded if their
identifier differs from the identifier in the folder. If two runs write an identifier at the same time, later runs can
use only the copies of the run that wrote last.

This module does not import torch.
"""

from __future__ import annotations

import secrets
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import storage_of

FILE = "peer_copies_id"


def read_identity(root: PurePath) -> str | None:
    """Return the run identifier that is stored in a --save folder; None if the folder contains no identifier. Raises
    OSError if the folder cannot be read."""
    content = storage_of(root).content(root / FILE)
    return None if content is None else content.decode(errors="replace").strip() or None


def write_identity(root: PurePath, identity: str) -> None:
    """Write the identifier of a run to a --save folder, and create the folder if it does not exist. Raises OSError if
    the identifier cannot be written."""
    if isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
    storage_of(root).write(root / FILE, f"{identity}\n".encode())


def new_identity(root: PurePath) -> tuple[str, str]:
    """Write a new random identifier to a --save folder. Return the identifier and an error message. The message is
    empty if the identifier was written. Otherwise, no later run can use the copies of this run."""
    identity = secrets.token_hex(16)
    try:
        write_identity(root, identity)
    except OSError as error:
        return identity, f"{type(error).__name__}: {error}"
    return identity, ""


def keep_identity(root: PurePath, identity: str) -> None:
    """Write the identifier of the run to a --save folder if the folder contains no identifier. The folder contains no
    identifier if it was deleted during the run, and a save created it again. Raises OSError if the identifier cannot be
    written."""
    if read_identity(root) is None:
        write_identity(root, identity)


def drop_identity(root: PurePath) -> None:
    """Delete the run identifier from a --save folder, if there is one, so that no later run can load the existing
    copies. Raises OSError if the identifier cannot be deleted."""
    if read_identity(root) is not None:
        storage_of(root).remove(root / FILE)
