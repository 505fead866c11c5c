"""Choice of the checkpoint to load: the newest that is complete and undamaged, with the reason for each one skipped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import PurePath

from megatron.core.collectives import gather_objects
from megatron.core.dist_checkpointing.dcp_index import INDEX
from megatron.core.dist_checkpointing.file_storage import storage_of
from megatron.core.dist_checkpointing.integrity import MANIFEST, damages, read_manifest
from megatron.core.dist_checkpointing.path_kind import METADATA, Candidates, candidates, saved_folders
from megatron.core.dist_checkpointing.storage import Checkpoint, on_first_rank, open_checkpoint, ranks_without
from megatron.core.parallel_state import Axis
from megatron.training.config.rules.saved_types import metadata_problem

REMEDY = "name a folder on a file system that all hosts share"


def choose_checkpoint(
    path: PurePath,
    world: Axis,
    say: Callable[[str], None] = lambda line: None,
    verified: bool = True,
) -> Checkpoint | None:
    """Opens the newest complete and undamaged checkpoint; None if there is no checkpoint. Collective over `world`.

    If they are to be `verified`, every file is read by one of the ranks and compared with the manifest. A checkpoint is
    also damaged if its metadata have values of wrong types. `say` receives one line for each checkpoint skipped, on
    every rank. Raises ValueError on every rank if there are checkpoints and none is readable.
    """
    found = on_first_rank(lambda: candidates(path), world)
    _check_seen(path, found, world)
    reasons = list(found.remarks)
    for remark in found.remarks:
        say(remark)
    for folder in found.folders:
        problems = verify(folder, world) if verified else []
        if not problems:
            try:
                checkpoint = open_checkpoint(folder, world)
                if (broken := metadata_problem(checkpoint.payload)) is None:
                    return checkpoint
                problems = [f"{METADATA} is damaged: {broken}"]
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


def _check_seen(path: PurePath, found: Candidates, world: Axis) -> None:
    """Raises ValueError, on every rank, if some ranks see checkpoints that others do not: hosts with a disk each. Whole
    copies of the checkpoints on every host are as good as one folder."""
    if found.folders:
        without = ranks_without(any(storage_of(folder).exists(folder) for folder in found.folders), world)
        if without:
            raise ValueError(
                f"the checkpoints that rank 0 sees in {path} are not there for {without}; {REMEDY}, or copy them whole "
                "to each host"
            )
    elif with_own := ranks_without(not saved_folders(path), world):
        raise ValueError(
            f"rank 0 sees no checkpoint in {path} and would start from scratch, but there are some for {with_own}; "
            f"{REMEDY}"
        )


def verify(folder: PurePath, world: Axis) -> list[str]:
    """Compares files with the manifest; the ranks share the reading. Returns the problems, the same on all ranks."""

    def sums_or_reason() -> tuple[dict[str, dict[str, int]], str | None]:
        try:
            sums = read_manifest(folder)
            needed = {METADATA, INDEX, *(name for name in storage_of(folder).names(folder) if name.endswith(".distcp"))}
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
