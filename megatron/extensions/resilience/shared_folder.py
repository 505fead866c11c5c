"""Checks at start that all ranks see one --save folder: checkpoints hold files of every rank, so that hosts cannot save
one on disks of their own.

Without this check, a run on such hosts would train until its first save and then keep nothing.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from megatron.core.dist_checkpointing.latest_checkpoint import REMEDY
from megatron.core.dist_checkpointing.storage import CheckpointError, on_first_rank, ranks_without
from megatron.core.parallel_state import Axis
from megatron.training.hooks import Callback
from megatron.training.initialize import Runtime

PATIENCE = 10.0
"""Seconds in which a file of one host has to be seen on the others: network file systems cache folders for a while."""


class SharedFolder(Callback):
    """Checks the --save folder before the model is built."""

    def on_setup(self, runtime: Runtime) -> None:
        check_shared(Path(str(self.config.checkpoint.save)), "--save", runtime.state.world)


def check_shared(folder: Path, flag: str, world: Axis) -> None:
    """Raises ValueError, on every rank, if `folder` is not the same one for all ranks. Collective over `world`.

    The first rank creates the folder, and a file in it for the moment. Where it cannot, nothing is checked: saves
    report that by themselves.
    """
    if world.size == 1:
        return
    try:
        mark = on_first_rank(lambda: _mark(folder), world)
    except CheckpointError:
        return
    without = ranks_without(_sees(folder / mark), world)
    on_first_rank(lambda: _forget(folder / mark), world)
    if without:
        raise ValueError(
            f"{flag} {folder} is not one folder for all ranks: what rank 0 writes there, {without} cannot see, and a "
            f"checkpoint has files of every rank; {REMEDY}"
        )


def _mark(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".seen-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name


def _forget(mark: Path) -> None:
    with suppress(OSError):
        mark.unlink()


def _sees(mark: Path) -> bool:
    limit = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > limit:
            return False
        with suppress(OSError):
            os.listdir(mark.parent)  # has a network file system look again
        time.sleep(0.1)
    return True
