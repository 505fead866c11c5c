"""The groups of ranks of a dry run."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.parallel_dims import ParallelDims

GROUPS_SHOWN = 4
RANKS_SHOWN = 8

MOST_LISTED = 2**17
"""Ranks up to which groups are listed: their lists take seconds."""


def group_lines(dims: ParallelDims) -> Iterator[str]:
    """The groups along each axis that is cut."""
    axes = [("TP", "tp"), ("CP", "cp"), ("DP", "dp"), ("PP", "pp"), ("EP", "ep")]
    if dims.ep > 1 or dims.expt_tp != dims.tp:
        axes += [("ETP", "expt_tp"), ("EDP", "expt_dp")]  # tensor and data parallelism of the experts
    yield ", ".join(f"{name} {dims.size(axis)}" for name, axis in axes)
    for name, axis in axes:
        size = dims.size(axis)
        if size > 1 and dims.world_size > MOST_LISTED:
            yield f"{name} {dims.world_size // size} groups of {size}; above {MOST_LISTED:,} ranks they are not listed"
        elif size > 1:
            groups = dims.groups(axis)
            shown = " ".join(_ranks(group) for group in groups[:GROUPS_SHOWN])
            more = f" ... {_ranks(groups[-1])}" if len(groups) > GROUPS_SHOWN else ""
            yield f"{name} {len(groups)} groups of {size}: {shown}{more}"


def _ranks(group: tuple[int, ...]) -> str:
    """`[0,1]`, and for many ranks the first few and the last."""
    if len(group) <= RANKS_SHOWN:
        return "[" + ",".join(map(str, group)) + "]"
    return "[" + ",".join(map(str, group[:3])) + f",...,{group[-1]}]"
