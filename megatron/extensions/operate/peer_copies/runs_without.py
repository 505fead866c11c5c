"""Callback for runs that save checkpoints (--save) but do not copy their state to other hosts (--peer-copies)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from megatron.extensions.operate.peer_copies.identity import drop_identity
from megatron.training.hooks import Callback
from megatron.training.progress import BegunRun, Progress


class DropsIdentity(Callback):
    """Callback that deletes SAVE/peer_copies_id. If this file remained, a later run with --peer-copies could load
    copies that are older than the checkpoints of this run."""

    start_order = -1  # This callback must run before callbacks that load local checkpoints.

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        save = self.config.checkpoint.save_root
        if begun.state.world.first and save is not None:
            with suppress(OSError):  # if the folder cannot be written, this run saves no checkpoint in it either
                drop_identity(save)
        return None
