"""Identity of the content of a --save folder, by which copies in memory belong to it.

Copies outlive the ranks, and also the folder: somebody may delete it, or put another run in its place. So a start that
does not continue from copies writes a new random identity to SAVE/peer_copies_id before its first step, and its copies
carry this identity. A start that continues from copies keeps it. A start without --peer-copies removes it. Copies with
another identity than the folder's are never loaded. If two starts race, the copies of the one that has written first do
not count.

This module does not import torch.
"""

from __future__ import annotations

import secrets
from pathlib import Path, PurePath

from megatron.core.dist_checkpointing.file_storage import storage_of

FILE = "peer_copies_id"


def read_identity(root: PurePath) -> str | None:
    """Read the identity of a --save folder; None if the folder has none. Raises OSError."""
    content = storage_of(root).content(root / FILE)
    return None if content is None else content.decode(errors="replace").strip() or None


def write_identity(root: PurePath, identity: str) -> None:
    """Store the identity of a --save folder, which is created if it does not exist. Raises OSError."""
    if isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
    storage_of(root).write(root / FILE, f"{identity}\n".encode())


def new_identity(root: PurePath) -> tuple[str, str]:
    """Give a --save folder a new identity. Returns the identity, and the reason why it could not be stored, or an empty
    text; no later start can then use the copies of this one."""
    identity = secrets.token_hex(16)
    try:
        write_identity(root, identity)
    except OSError as error:
        return identity, f"{type(error).__name__}: {error}"
    return identity, ""


def keep_identity(root: PurePath, identity: str) -> None:
    """Store the identity again if the folder was deleted during the run, and a save has created it again. Raises
    OSError."""
    if read_identity(root) is None:
        write_identity(root, identity)


def drop_identity(root: PurePath) -> None:
    """Remove the identity of a --save folder, if it has one: no start can then use copies made before. Raises
    OSError."""
    if read_identity(root) is not None:
        storage_of(root).remove(root / FILE)
