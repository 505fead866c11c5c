"""Which ranks of a world are rehearsed: one of each kind, all, or those that are named. No torch."""

from __future__ import annotations

from megatron.core.parallel_dims import ParallelDims

DISTINCT = "all-distinct"

AXES = (("pp", "dp", "cp", "tp"), ("pp", "expt_dp", "ep", "expt_tp"))


def distinct_ranks(dims: ParallelDims) -> list[int]:
    """One rank of each kind: every pipeline rank, as their lists of actions and their layers differ; and along each
    other axis the last rank beside the first, in the first and the last stage. Code may treat the ends of an axis
    differently: the first rank reports, the last shard of a buffer is shorter, the rings of context parallelism end."""
    found = {dims.rank(pp=pp) for pp in range(dims.pp)}
    for pp in {0, dims.pp - 1}:
        for order in AXES:
            for axis in order[1:]:
                found.add(dims.rank(pp=pp, **{axis: dims.size(axis) - 1}))
            found.add(dims.rank(pp=pp, **{axis: dims.size(axis) - 1 for axis in order[1:]}))
    return sorted(found)


def chosen_ranks(text: str, dims: ParallelDims) -> list[int]:
    """The ranks that --ranks says: "all-distinct", "all", or numbers and ranges as 0,8,1016-1023. Raises ValueError."""
    if text == DISTINCT:
        return distinct_ranks(dims)
    if text == "all":
        return list(range(dims.world_size))
    found: set[int] = set()
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() if dash else not last)):
            raise ValueError(f"--ranks {text}: {word!r} is no rank; give {DISTINCT}, all, or ranks as 0,8,16-23")
        ranks = range(int(first), int(last or first) + 1)
        if not ranks:
            raise ValueError(f"--ranks {text}: {word} ends before it begins; give the lower rank first")
        if ranks[-1] >= dims.world_size:
            raise ValueError(
                f"--ranks {text}: {word} must lie in 0 to {dims.world_size - 1}; raise --world-size, or leave it out"
            )
        found.update(ranks)
    return sorted(found)


def coords_of(rank: int, dims: ParallelDims) -> dict[str, int]:
    """Coordinates of a rank along the axes that are cut."""
    coords = dims.coords(rank)
    axes = ["pp", "dp", "cp", "tp"] + (["ep", "expt_dp", "expt_tp"] if dims.ep > 1 or dims.expt_tp != dims.tp else [])
    return {axis: coords[axis] for axis in axes if dims.size(axis) > 1}
