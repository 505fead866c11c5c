"""Callback for runs with --save but without --peer-copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from megatron.extensions.operate.peer_copies.identity import drop_identity
from megatron.training.hooks import Callback
from megatron.training.progress import BegunRun, Progress


class DropsIdentity(Callback):
    """Callback that removes the identity from --save, because this start does not continue from copies in memory.
    If the identity remained, a later start with --peer-copies could load older copies instead of the result of this
    run."""

    start_order = -1  # runs even if another callback then loads a local checkpoint

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        save = self.config.checkpoint.save_root
        if begun.state.world.first and save is not None:
            with suppress(OSError):  # a folder that cannot be written also contains no checkpoint of this run
                drop_identity(save)
        return None
