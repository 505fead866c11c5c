"""Retention of checkpoints: which to keep, decided from integers, and the deletion of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path

from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.path_kind import METADATA, saved_folders
from megatron.core.dist_checkpointing.storage import remove
from megatron.extensions.retention.flags import RetentionFlags
from megatron.training.config.run_config import RunConfig


def to_delete(
    rules: RetentionFlags, scores: Mapping[int, float | None], newest: int, held: Collection[int]
) -> list[int]:
    """Returns the iterations to delete after `newest` was saved: those that no rule keeps. Of equal best ones the
    earliest is kept.

    `scores` maps every saved iteration to its metric, None if not measured. Iterations in `held` are kept, and so are
    those above `newest`, which another branch of the run may need.
    """
    own = sorted(iteration for iteration in scores if iteration <= newest)
    keep = {newest, *held, *own[-(rules.keep_last or 1) :]}
    if rules.keep_every:
        keep |= {iteration for iteration in own if iteration % rules.keep_every == 0}
    if rules.save_retain_best:
        measured = [(score, i) for i in own if (score := scores[i]) is not None and math.isfinite(score)]
        keep |= {i for _, i in sorted(measured)[:1]}
    return [iteration for iteration in own if iteration not in keep]


def retain(rules: RetentionFlags, root: Path, newest: int, held: Collection[Path]) -> None:
    """Deletes the checkpoints that no rule keeps, after `newest` is complete. Called on one rank.

    Keeps folders in `held` and anything that is not a complete checkpoint. A folder is hidden by one rename before its
    files are removed. Raises OSError.
    """
    folders = {number: path for number, path in saved_folders(root).items() if (path / MANIFEST).exists()}
    scores = {number: _score(folder, rules.save_retain_best) for number, folder in folders.items()}
    stays = {folder.resolve() for folder in held}
    kept = [number for number, folder in folders.items() if folder.resolve() in stays]
    for number in to_delete(rules, scores, newest, kept):
        hidden = folders[number].with_suffix(".tmp")  # the next save removes it if this process dies half-way
        folders[number].rename(hidden)
        remove(hidden)


def cleanup(config: RunConfig) -> Callable[[Path, int, Collection[Path]], None]:
    """`retain` by the flags of a run."""
    return partial(retain, config.options(RetentionFlags))


def _score(folder: Path, metric: str | None) -> float | None:
    if metric is None:
        return None
    try:
        value = parse_json((folder / METADATA).read_text())["metrics"][metric]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return float(value) if isinstance(value, int | float) else None
