"""Callback of runs with --save but without --peer-copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from megatron.extensions.operate.peer_copies.identity import drop_identity
from megatron.training.hooks import Callback
from megatron.training.progress import BegunRun, Progress


class DropsIdentity(Callback):
    """Remove the identity from --save, because this start does not continue from copies in memory. Otherwise a later
    start with --peer-copies could replace the result of this run with older copies."""

    start_order = -1  # also after loading a local checkpoint

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        save = self.config.checkpoint.save_root
        if begun.state.world.first and save is not None:
            with suppress(OSError):  # a folder that cannot be written holds no checkpoint of this run either
                drop_identity(save)
        return None
