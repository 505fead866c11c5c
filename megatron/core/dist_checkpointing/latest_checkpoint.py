"""Choice of the checkpoint to load: the newest that is complete and undamaged, with the reason for each one skipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.integrity import MANIFEST, damages, read_manifest
from megatron.core.dist_checkpointing.path_kind import (
    LATEST,
    METADATA,
    PATH_KINDS,
    is_checkpoint,
    kind_of,
    read_latest,
    refusal,
    saved_folders,
)
from megatron.core.dist_checkpointing.storage import INDEX, Checkpoint, on_first_rank, open_checkpoint, ranks_without
from megatron.core.parallel_state import Axis

REMEDY = "name a folder on a file system that all hosts share"


@dataclass(frozen=True)
class Candidates:
    """Checkpoint folders to try, in order, and remarks about the folder that holds them."""

    folders: tuple[Path, ...]
    remarks: tuple[str, ...] = ()


def candidates(path: Path) -> Candidates:
    """Lists the checkpoints that `path` may mean: itself, or, of a folder of checkpoints, the latest and earlier ones.

    The latest is the one that the text file names, or the newest where that file is missing or damaged. Raises
    ValueError if the file is damaged and there is no checkpoint, or if the checkpoints are another program's.
    """
    if PATH_KINDS.facts(kind_of(path)).convert:
        raise ValueError(refusal(path))
    if is_checkpoint(path):
        return Candidates((path,))
    saved = saved_folders(path)
    try:
        latest, remarks = read_latest(path), []
    except ValueError as error:
        if not saved:
            raise
        latest, remarks = None, [f"{error}; taken as the latest: {max(saved)}"]
    else:
        if latest is None and saved:
            remarks.append(f"there is no {LATEST} in {path}; taken as the latest: {max(saved)}")
    numbers = sorted((number for number in saved if latest is None or number <= latest), reverse=True)
    if latest is not None and latest not in saved:
        remarks.append(f"skipped checkpoint {latest} that {path / LATEST} names: there is no folder of it")
    return Candidates(tuple(saved[number] for number in numbers), tuple(remarks))


def choose_checkpoint(path: Path, world: Axis, say: Callable[[str], None] = lambda line: None) -> Checkpoint | None:
    """Opens the newest complete and undamaged checkpoint; None if there is no checkpoint. Collective over `world`.

    Every file is read by one of the ranks and compared with the manifest. `say` receives one line for each checkpoint
    skipped, on every rank. Raises ValueError on every rank if there are checkpoints and none is readable.
    """
    found = on_first_rank(lambda: candidates(path), world)
    _check_seen(path, found, world)
    reasons = list(found.remarks)
    for remark in found.remarks:
        say(remark)
    for folder in found.folders:
        problems = verify(folder, world)
        if not problems:
            try:
                return open_checkpoint(folder, world)
            except ValueError as error:
                problems = [str(error)]
        reasons.append(f"skipped checkpoint {folder}: {'; '.join(problems)}")
        say(reasons[-1])
    if reasons:
        raise ValueError(
            f"{path} holds no checkpoint that can be loaded: " + ". ".join(reasons) + ". Restore one from a copy, "
            "or name another folder"
        )
    return None


def _check_seen(path: Path, found: Candidates, world: Axis) -> None:
    """Raises ValueError, on every rank, if some ranks see checkpoints that others do not: hosts with a disk each. Whole
    copies of the checkpoints on every host are as good as one folder."""
    if found.folders:
        without = ranks_without(any(folder.exists() for folder in found.folders), world)
        if without:
            raise ValueError(
                f"the checkpoints that rank 0 sees in {path} are not there for {without}; {REMEDY}, or copy them whole "
                "to each host"
            )
    elif with_own := ranks_without(not saved_folders(path), world):
        raise ValueError(
            f"rank 0 sees no checkpoint in {path} and would start anew, but there are some for {with_own}; {REMEDY}"
        )


def verify(folder: Path, world: Axis) -> list[str]:
    """Compares files with the manifest; the ranks share the reading. Returns the problems, the same on all ranks."""

    def sums_or_reason() -> tuple[dict[str, dict[str, int]], str | None]:
        try:
            sums = read_manifest(folder)
            needed = {METADATA, INDEX, *(path.name for path in folder.glob("*.distcp"))}
            unlisted = ", ".join(sorted(needed - sums.keys()))
            return sums, f"{MANIFEST} does not list {unlisted}" if unlisted else None
        except ValueError as error:
            return {}, str(error)

    sums, reason = on_first_rank(sums_or_reason, world)
    if reason is not None:
        return [reason]
    largest_first = sorted(sums, key=lambda name: -sums[name]["bytes"])
    mine = damages(folder, sums, largest_first[world.rank :: world.size])
    return [problem for problems in gather_objects(mine, world) for problem in problems]
