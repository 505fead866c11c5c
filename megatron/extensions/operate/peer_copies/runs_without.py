"""Callback of runs with --save but without --peer-copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from megatron.extensions.operate.peer_copies.identity import drop_identity
from megatron.training.hooks import Callback
from megatron.training.progress import BegunRun, Progress


class DropsIdentity(Callback):
    """Takes the identity from --save, because this start does not continue from copies in memory. What it trains and
    saves could otherwise be replaced by older copies, if a later start has --peer-copies again."""

    start_order = -1  # also if the state is that of a local checkpoint

    def start(self, begun: BegunRun, say: Callable[[str], None], data: Callable[[int], str | None]) -> Progress | None:
        save = self.config.checkpoint.save_root
        if begun.state.world.first and save is not None:
            with suppress(OSError):  # what cannot be written now holds no checkpoint of this run either
                drop_identity(save)
        return None
