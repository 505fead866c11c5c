"""Inventories of hosts, and complete sets of copies: steps for which there is a copy of every part.

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
    """Complete copy of a part on a host."""

    host: str
    generation: str
    iteration: int
    part: str
    file: str
    """Name of the data file in the folder of the generation."""

    number: int = 0
    """Sequence number of the step's copies within the generation. The number distinguishes copies of the same
    iteration. A run that goes back to an earlier step copies an iteration again, with different content."""


@dataclass(frozen=True)
class Inventory:
    """Inventory of the copies on a host."""

    copies: tuple[Copy, ...] = ()
    parts: Mapping[str, tuple[str, ...]] | None = None
    """Maps a generation to the names of the parts of a complete set."""

    identities: Mapping[str, str] = field(default_factory=dict)
    """Maps a generation to the identity of the --save folder that its copies belong to."""

    def of_folder(self, identity: str | None) -> Inventory:
        """Return an inventory with only the copies that belong to the --save folder with this identity. The inventory
        is empty if the identity is None."""
        mine = {name for name, each in self.identities.items() if each == identity}
        parts = {name: each for name, each in (self.parts or {}).items() if name in mine}
        return replace(self, copies=tuple(copy for copy in self.copies if copy.generation in mine), parts=parts)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Inventory:
        """Convert an inventory from JSON types."""
        parts = {name: tuple(each) for name, each in (record["parts"] or {}).items()}
        return cls(tuple(Copy(**copy) for copy in record["copies"]), parts, dict(record["identities"]))


@dataclass(frozen=True)
class CompleteSet:
    """Set of copies of all parts, from one step of one start."""

    generation: str
    number: int
    iteration: int
    copies: Mapping[str, tuple[Copy, ...]]
    """Copies by part."""

    def without(self, damaged: Collection[Copy]) -> CompleteSet:
        """Return the set without damaged copies. The result may have parts without a copy."""
        left = {part: tuple(each for each in copies if each not in damaged) for part, copies in self.copies.items()}
        return replace(self, copies=left)

    @property
    def lost(self) -> str:
        """Return the parts that have no copy."""
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
    """Return the complete sets, in which at least one host has each part. The newest set comes first; sets are ordered
    by generation and then by number."""
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
    """Return a one-line explanation of why there is no complete set; empty if there are no copies at all."""
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
    """Delete all copies on a host except the given ones."""
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
