"""Identity of a --save folder's content. Copies in memory record the identity of the content that they belong to.

Copies outlive the ranks. Copies may also outlive the folder, because a user may delete the folder or replace it with
the folder of another run. Therefore, a start that does not continue from copies writes a new random identity to
SAVE/peer_copies_id before its first step. The copies of this start record the identity. A start that continues from
copies keeps the identity. A start without --peer-copies deletes SAVE/peer_copies_id. Copies with an identity other than
the folder's are never loaded. If two starts write an identity at the same time, only copies of the start that wrote
last are used.

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
    """Store the identity of a --save folder. Creates the folder if it does not exist. Raises OSError."""
    if isinstance(root, Path):
        root.mkdir(parents=True, exist_ok=True)
    storage_of(root).write(root / FILE, f"{identity}\n".encode())


def new_identity(root: PurePath) -> tuple[str, str]:
    """Store a new identity in a --save folder. Returns the identity and a second string: the reason if the identity
    could not be stored, and otherwise an empty string. If the identity is not stored, no later start can use the copies
    of this start."""
    identity = secrets.token_hex(16)
    try:
        write_identity(root, identity)
    except OSError as error:
        return identity, f"{type(error).__name__}: {error}"
    return identity, ""


def keep_identity(root: PurePath, identity: str) -> None:
    """Store the identity again if the folder was deleted during the run and a save has created it again. Raises
    OSError."""
    if read_identity(root) is None:
        write_identity(root, identity)


def drop_identity(root: PurePath) -> None:
    """Remove the identity of a --save folder, if there is one, so that no later start can use existing copies. Raises
    OSError."""
    if read_identity(root) is not None:
        storage_of(root).remove(root / FILE)
