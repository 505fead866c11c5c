"""Identity of a --save folder's content, which ties copies in memory to it.

Copies outlive the ranks, and may outlive the folder, which a user may delete or replace with another run. A start that
does not continue from copies therefore writes a new random identity to SAVE/peer_copies_id before its first step, and
its copies carry this identity. A start that continues from copies keeps the identity. A start without --peer-copies
removes it. Copies whose identity differs from the folder's are never loaded. If two starts race, the copies of the
start that wrote its identity first are not used.

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
    """Store a new identity in a --save folder. Returns the identity, and an empty string or the reason why it could not
    be stored. Without a stored identity, no later start can use the copies of this one."""
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
    """Remove the identity of a --save folder, if it has one, so that no start can use earlier copies. Raises
    OSError."""
    if read_identity(root) is not None:
        storage_of(root).remove(root / FILE)
