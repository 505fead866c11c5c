"""Which checkpoints to keep. Pure integers decide; deleting hides a folder by one rename before it removes files."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.storage import METADATA, remove, saved_folders


@dataclass(frozen=True)
class Retention:
    """A checkpoint is kept if any of these wants it. With none of them given, all are kept."""

    last: int | None = None
    """The newest so many; 1 where another field is given."""

    every: int | None = None
    """Those whose iteration is a multiple of this."""

    best: str | None = None
    """The one with the lowest value of this metric; the earliest of equal ones."""

    @property
    def keeps_all(self) -> bool:
        return self.last is None and self.every is None and self.best is None


def to_delete(
    retention: Retention, scores: Mapping[int, float | None], newest: int, held: Collection[int]
) -> list[int]:
    """Of the iterations saved, those to delete after `newest` was saved.

    `scores` has every iteration saved, with its metric where it was measured there. Iterations in `held` stay, and
    so do those above `newest`, which another branch of the run may still want.
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
    """Deletes what `retention` does not want, now that the checkpoint of `newest` is complete. On one rank.

    Folders in `held` stay, as does anything that is no complete checkpoint. Raises OSError.
    """
    if retention.keeps_all:
        return
    folders = {number: path for number, path in saved_folders(root).items() if (path / MANIFEST).exists()}
    scores = {number: _score(folder, retention.best) for number, folder in folders.items()}
    stays = {folder.resolve() for folder in held}
    kept = [number for number, folder in folders.items() if folder.resolve() in stays]
    for number in to_delete(retention, scores, newest, kept):
        hidden = folders[number].with_suffix(".tmp")  # which the next save clears, if this one dies half-way
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
