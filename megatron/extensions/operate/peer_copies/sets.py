"""Search for the steps for which the hosts together hold copies of all parts of the training state. An inventory
(`Inventory`) lists the copies on one host.

This module does not import torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.extensions.operate.peer_copies.client import number_of
from megatron.extensions.operate.peer_copies.holder import WORLD, header_of, headers_in


@dataclass(frozen=True)
class Copy:
    """Complete copy of a part of the training state on one host."""

    host: str
    generation: str
    iteration: int
    part: str
    file: str
    """Name of the file that contains the bytes of the part. The file is in the folder of `generation`."""

    number: int = 0
    """Number of steps that were copied since the ranks were started, up to and including this copy. The number
    distinguishes copies of the same iteration: a run that returns to an earlier step copies later iterations a second
    time, with different content."""


@dataclass(frozen=True)
class Inventory:
    """List of the copies on a host. The copies that were made after one start of the ranks form a generation."""

    copies: tuple[Copy, ...] = ()
    parts: Mapping[str, tuple[str, ...]] | None = None
    """Maps each generation (the copies that were made after one start of the ranks) to the names of all parts of the
    training state."""

    identities: Mapping[str, str] = field(default_factory=dict)
    """Maps each generation to the content that SAVE/peer_copies_id had when the copies of the generation were made."""

    def of_folder(self, identity: str | None) -> Inventory:
        """Return an inventory with only the copies that contain the run identifier `identity` of a --save folder. If
        `identity` is None, the folder has no identifier, and the inventory is empty."""
        mine = {name for name, each in self.identities.items() if each == identity}
        parts = {name: each for name, each in (self.parts or {}).items() if name in mine}
        return replace(self, copies=tuple(copy for copy in self.copies if copy.generation in mine), parts=parts)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Inventory:
        """Create an inventory from the fields that were read from JSON."""
        parts = {name: tuple(each) for name, each in (record["parts"] or {}).items()}
        return cls(tuple(Copy(**copy) for copy in record["copies"]), parts, dict(record["identities"]))


@dataclass(frozen=True)
class CompleteSet:
    """Copies of all parts of the training state after the same step."""

    generation: str
    number: int
    iteration: int
    copies: Mapping[str, tuple[Copy, ...]]
    """Maps the name of each part of the training state to the copies of this part."""

    def without(self, damaged: Collection[Copy]) -> CompleteSet:
        """Return the set without the copies in `damaged`. Some parts may then have no copy left."""
        left = {part: tuple(each for each in copies if each not in damaged) for part, copies in self.copies.items()}
        return replace(self, copies=left)

    @property
    def lost(self) -> str:
        """Names of the parts of the training state that have no copy, separated by commas; empty if the set is
        complete."""
        return ", ".join(part for part, copies in self.copies.items() if not copies)


def inventory(folder: Path, host: str) -> Inventory:
    """Read the inventory of a host from its folder."""
    copies = list[Copy]()
    parts, identities = dict[str, tuple[str, ...]](), dict[str, str]()
    for generation in sorted(folder.glob("g*")):
        if not number_of(generation.name):
            continue
        with suppress(OSError, ValueError):
            world = json.loads((generation / WORLD).read_bytes())
            parts[generation.name], identities[generation.name] = tuple(world["parts"]), world.get("identity", "")
            for data, header in headers_in(generation):
                about = int(header["iteration"]), str(header["part"]), data.name, int(header.get("number", 0))
                copies.append(Copy(host, generation.name, *about))
    return Inventory(tuple(copies), parts, identities)


def complete_sets(held: Iterable[Inventory]) -> list[CompleteSet]:
    """Return the steps for which each part of the training state has a copy on some host, newest first. Steps that were
    copied after a later start of the ranks (`Copy.generation`) are newer. Among the steps that were copied after the
    same start, steps with a higher `Copy.number` are newer."""
    found: dict[tuple[str, int, int], dict[str, list[Copy]]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for each in held:
        parts |= each.parts or {}
        for copy in each.copies:
            found.setdefault((copy.generation, copy.number, copy.iteration), {}).setdefault(copy.part, []).append(copy)
    sets = [
        CompleteSet(generation, number, iteration, {part: tuple(copies) for part, copies in there.items()})
        for (generation, number, iteration), there in found.items()
        if there.keys() >= set(parts.get(generation, ("?",)))
    ]
    return sorted(sets, key=lambda each: (number_of(each.generation), each.number, each.iteration), reverse=True)


def why_none(held: Sequence[Inventory]) -> str:
    """Return a line that explains why no step has copies of all parts; an empty string if there are no copies."""
    copies = [copy for each in held for copy in each.copies]
    if not copies:
        return ""
    last = max((number_of(copy.generation), copy.number, copy.iteration) for copy in copies)
    newest = [copy for copy in copies if (number_of(copy.generation), copy.number, copy.iteration) == last]
    wanted = next(
        (parts for each in held for name, parts in (each.parts or {}).items() if number_of(name) == last[0]), ()
    )
    missing = sorted(set(wanted) - {copy.part for copy in newest})
    few = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    return f"no living host has part {few} of iteration {last[2]}" if missing else "no step is complete"


def drop_others(folder: Path, kept: Collection[Copy]) -> None:
    """Delete all copies in the folder of a host except those in `kept`."""
    files = {(copy.generation, copy.file) for copy in kept}
    for generation in folder.glob("g*"):
        mine = {name for owner, name in files if owner == generation.name}
        if not mine:
            shutil.rmtree(generation, ignore_errors=True)
            continue
        names = {WORLD, *mine, *(header_of(Path(name)).name for name in mine)}
        for path in generation.iterdir():
            if path.name not in names:
                path.unlink(missing_ok=True)
