"""Checkpoint retention. A pure function chooses the checkpoints to delete. The other functions of this module delete
them."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath

from megatron.core.config.json_text import parse_json
from megatron.core.dist_checkpointing.file_storage import resolved, storage_of
from megatron.core.dist_checkpointing.integrity import MANIFEST
from megatron.core.dist_checkpointing.path_kind import METADATA, saved_folders
from megatron.extensions.operate.checkpoint_cleanup.flags import RetentionFlags
from megatron.training.hooks import Callback

BEST = "best"
"""Name of the symbolic link in the --save folder that points to the checkpoint kept by --save-retain-best."""

NO_LINKS = (None, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EACCES)
"""Error numbers that mean that symbolic links cannot be created: the file system does not support them, or, on Windows,
the process lacks the required privilege."""


def to_delete(
    rules: RetentionFlags, scores: Mapping[int, float | None], newest: int, held: Collection[int]
) -> list[int]:
    """Return the iterations of the checkpoints to delete after the checkpoint `newest` was saved. A checkpoint is
    deleted if no retention rule keeps it. If several checkpoints have the same best score, the earliest one is kept.

    `scores` maps every saved iteration to the value of the metric, or to None if the metric was not measured.
    Checkpoints whose iterations are in `held` are kept. Checkpoints later than `newest` are also kept. Later
    checkpoints exist if the run was resumed from an earlier checkpoint.
    """
    own = sorted(iteration for iteration in scores if iteration <= newest)
    keep = {newest, *held, *own[-(rules.keep_last or 1) :]}
    if rules.keep_every:
        keep |= {iteration for iteration in own if iteration % rules.keep_every == 0}
    if rules.save_retain_best and (best := best_of(scores, newest)) is not None:
        keep.add(best)
    return [iteration for iteration in own if iteration not in keep]


def best_of(scores: Mapping[int, float | None], newest: int) -> int | None:
    """Return the iteration with the lowest score among iterations up to `newest`; None if no score is finite. On a tie,
    the earliest iteration is returned."""
    measured = [(score, i) for i, score in scores.items() if i <= newest and score is not None and math.isfinite(score)]
    return min(measured)[1] if measured else None


def retain(rules: RetentionFlags, root: PurePath, newest: int, held: Collection[PurePath]) -> None:
    """Delete the checkpoints that no retention rule keeps. Call this function after the checkpoint `newest` is
    complete, and on one rank only.

    Checkpoint folders in `held` and folders without a complete checkpoint are kept. A checkpoint folder is renamed to a
    hidden name before its files are deleted. Raises OSError if files cannot be deleted.
    """
    storage = storage_of(root)
    folders = {number: path for number, path in saved_folders(root).items() if storage.exists(path / MANIFEST)}
    scores = _scores(folders, newest, rules.save_retain_best)
    stays = {resolved(folder) for folder in held}
    kept = [number for number, folder in folders.items() if resolved(folder) in stays]
    for number in to_delete(rules, scores, newest, kept):
        storage.withdraw(folders[number])
    if rules.save_retain_best and (best := best_of(scores, newest)) is not None:
        _link(root / BEST, folders[best].name)


class Retention(Callback):
    """Callback that applies `retain` after each save, according to the flags of a run."""

    def clean_checkpoints(self, root: PurePath, newest: int, held: Collection[PurePath]) -> None:
        retain(self.config.options(RetentionFlags), root, newest, held)


def _link(link: PurePath, target: str) -> None:
    """Make `link` a symbolic link to `target`, atomically. If `link` exists but is not a link, do nothing. If the
    storage does not support links, write `target` to a text file that is named `link` with the suffix .txt. Raises
    OSError if neither can be written."""
    if not isinstance(link, Path):
        storage_of(link).write(link.with_suffix(".txt"), f"{target}\n".encode())
        return
    if link.exists() and not link.is_symlink():
        return
    beside = link.with_name(f"{link.name}.tmp")
    beside.unlink(missing_ok=True)
    try:
        beside.symlink_to(target)
    except (OSError, NotImplementedError) as error:
        if getattr(error, "errno", None) not in NO_LINKS:
            raise
        beside.write_text(f"{target}\n", encoding="utf-8")
        link = link.with_suffix(".txt")
    os.replace(beside, link)


def _scores(folders: Mapping[int, PurePath], newest: int, metric: str | None) -> dict[int, float | None]:
    """Return the metric value of each checkpoint, keyed by iteration. The value is None if the metric was not measured,
    or was measured on other validation data than the metric of the checkpoint `newest`."""
    payloads = {number: _payload(folder) if metric else {} for number, folder in folders.items()}
    data = _validation_data(payloads.get(newest, {}))
    return {
        number: _score(payload, metric)
        if metric and (metric == "lm_loss" or _validation_data(payload) == data)
        else None
        for number, payload in payloads.items()
    }


def _payload(folder: PurePath) -> dict[str, object]:
    """Return the metadata of a checkpoint; an empty dict if the metadata cannot be read."""
    try:
        found = parse_json(storage_of(folder).read(folder / METADATA).decode())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _score(payload: Mapping[str, object], metric: str) -> float | None:
    metrics = payload.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _validation_data(payload: Mapping[str, object]) -> list[object]:
    """Return the data paths and the sequence length of a checkpoint's training phase. Validation losses depend on the
    data paths and the sequence length."""
    phases = payload.get("stages")
    last = phases[-1] if isinstance(phases, list) and phases else None
    values = last.get("values") if isinstance(last, dict) else None
    fields = ("data_path", "valid_data_path", "valid", "split", "seq_length")
    return [values.get(field) for field in fields] if isinstance(values, dict) else [None] * len(fields)
