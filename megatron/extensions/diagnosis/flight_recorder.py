"""The last collectives of this rank, from torch's flight recorder."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch._C._distributed_c10d as c10d

from megatron.core.parallel_state import ParallelState

KEPT = 2000
"""Collectives that the recorder keeps on each rank."""

_DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")


@dataclass(frozen=True)
class Group:
    """Ranks that do collectives together, and the axis they lie on: equal for groups that do the same ones."""

    axis: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Entered:
    """The last collective that a rank has entered in a group."""

    axis: str
    ranks: tuple[int, ...]
    number: int
    """How many the rank has entered in this group: equal on all its ranks for the same collective."""

    what: str
    """Such as `all_reduce [4, 8] Float`."""

    pending: bool

    def __str__(self) -> str:
        return f"{self.what} (number {self.number} over {self.axis}, ranks {', '.join(map(str, self.ranks))})"


def record_collectives(environ: MutableMapping[str, str]) -> None:
    """Enables torch's flight recorder. Call it before `init_process_group`."""
    environ.setdefault("TORCH_FR_BUFFER_SIZE", str(KEPT))


def groups_of(state: ParallelState) -> dict[str, Group]:
    """torch's name of each group of this rank -> the group."""
    axes = {"all ranks": state.world, **state.axes}
    found: dict[str, Group] = {}
    for name, axis in axes.items():
        if axis.group is not None:
            found.setdefault(axis.group.group_name, Group(name, axis.ranks))
    return found


def traces() -> list[dict[str, Any]]:
    """The records of every backend's recorder; empty if this torch has none."""
    found = []
    for name in _DUMPS:
        if dump := getattr(c10d, name, None):
            text = dump(True, False)
            found.append(json.loads(text) if text else {})
    return found


def last_entered(
    recorded: list[dict[str, Any]], groups: Mapping[str, Group], last_pending: bool = False
) -> list[Entered]:
    """The last collective of each of `groups`. `last_pending`: the last one of all has failed, so it is not over."""
    found: dict[str, Entered] = {}
    for trace in recorded:
        entries = [e for e in trace.get("entries", []) if not e["is_p2p"] and e["process_group"][0] in groups]
        for place, entry in enumerate(entries, 1 - len(entries)):
            name = entry["process_group"][0]
            over = entry["state"] == "completed" or entry["retired"]
            pending = not over or (last_pending and place == 0)
            if name in found and found[name].pending and pending:
                continue  # the first of those under way
            group = groups[name]
            found[name] = Entered(group.axis, group.ranks, entry["collective_seq_id"], _describe(entry), pending)
    return list(found.values())


def _describe(entry: Mapping[str, Any]) -> str:
    operation = entry["profiling_name"].rpartition(":")[2]
    sizes, dtypes = entry.get("input_sizes") or [[]], entry.get("input_dtypes") or [""]
    return f"{operation} {list(sizes[0])} {dtypes[0]}".strip()
