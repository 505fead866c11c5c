"""Retention of checkpoints: which to keep, decided from integers, and the deletion of the others."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.path_kind import METADATA, saved_folders
from megatron.core.dist_checkpointing.storage import remove


@dataclass(frozen=True)
class Retention:
    """Retention rules. A checkpoint is kept if any rule keeps it. Without rules all are kept."""

    last: int | None = None
    """Keep the newest `last`; 1 if only other rules are given."""

    every: int | None = None
    """Keep iterations that are multiples of `every`."""

    best: str | None = None
    """Keep the one with the lowest value of this metric; of equal ones the earliest."""

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None


def to_delete(
    retention: Retention, scores: Mapping[int, float | None], newest: int, held: Collection[int]
) -> list[int]:
    """Returns the iterations to delete after `newest` was saved.

    `scores` maps every saved iteration to its metric, None if not measured. Iterations in `held` are kept, and so are
    those above `newest`, which another branch of the run may need.
    """
    if retention.keeps_all:
        return []
    own = sorted(iteration for iteration in scores if iteration <= newest)
    keep = {newest, *held, *own[-(retention.last or 1) :]}
    if retention.every:
        keep |= {iteration for iteration in own if iteration % retention.every == 0}
    if retention.best:
        measured = [(score, i) for i in own if (score := scores[i]) is not None and math.isfinite(score)]
        keep |= {i for _, i in sorted(measured)[:1]}
    return [iteration for iteration in own if iteration not in keep]


def retain(root: Path, retention: Retention, newest: int, held: Collection[Path]) -> None:
    """Deletes the checkpoints that `retention` does not keep, after `newest` is complete. Called on one rank.

    Keeps folders in `held` and anything that is not a complete checkpoint. A folder is hidden by one rename before its
    files are removed. Raises OSError.
    """
    if retention.keeps_all:
        return
    folders = {number: path for number, path in saved_folders(root).items() if (path / MANIFEST).exists()}
    scores = {number: _score(folder, retention.best) for number, folder in folders.items()}
    stays = {folder.resolve() for folder in held}
    kept = [number for number, folder in folders.items() if folder.resolve() in stays]
    for number in to_delete(retention, scores, newest, kept):
        hidden = folders[number].with_suffix(".tmp")  # the next save removes it if this process dies half-way
        folders[number].rename(hidden)
        remove(hidden)


def _score(folder: Path, metric: str | None) -> float | None:
    if metric is None:
        return None
    try:
        value = json.loads((folder / METADATA).read_text())["metrics"][metric]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) else None
