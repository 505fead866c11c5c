"""Which layers make a stage, and which rank runs it: integers only.

A *stage* is a global pipeline stage; a rank's local stages are its *chunks*, in the order of their stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap


@dataclass(frozen=True)
class Stage:
    """Contents of one pipeline stage: its layers by global number, the embedding (first), norm and head (last), and
    with the head the multi-token prediction modules."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True
    tied_stages: tuple[int, ...] = ()
    """The stages that each hold a copy of the embedding, if they are on different ranks."""


@dataclass(frozen=True)
class PipelineLayout:
    """Stages on ranks. `chunks` stages a rank are dealt round and round (stage = chunk * pp + rank), or, with
    `v_shaped`, there and back: rank 0 holds the first and the last stage."""

    pp: int = 1
    chunks: int = 1
    v_shaped: bool = False

    def __post_init__(self) -> None:
        assert self.pp >= 1 and self.chunks >= 1, f"pp {self.pp}, chunks {self.chunks}"

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    def rank_of(self, stage: int) -> int:
        """The pipeline rank that runs a stage."""
        chunk, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.v_shaped and chunk % 2 else place

    def chunk_of(self, stage: int) -> int:
        """The number of a stage among those of its rank."""
        return stage // self.pp

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """The stage that is chunk `chunk` of `rank`."""
        place = self.pp - 1 - rank if self.v_shaped and chunk % 2 else rank
        return chunk * self.pp + place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [self.stage_of(rank, chunk) for chunk in range(self.chunks)]


def split_layers(
    num_layers: int,
    num_stages: int,
    first_cost: float = 0.0,
    last_cost: float = 0.0,
    *,
    fixed: Mapping[int, int] | None = None,
    rank_of: Callable[[int], int] | None = None,
) -> list[range]:
    """The layers of each stage: contiguous, each layer exactly once, costs as even as whole layers allow.

    `first_cost` and `last_cost` are what the embedding and the head cost, in layers; they make the ends shorter. If
    stages tie, those of the least loaded rank get the extra layer (`rank_of` a stage; by default each is a rank of its
    own), and of these those in the middle. `fixed` gives some stages their number of layers and leaves the rest to the
    others. A stage may end up without layers."""
    fixed, rank_of = fixed or {}, rank_of or (lambda stage: stage)
    ends = (0, num_stages - 1)
    counts = [fixed.get(stage, 0) for stage in range(num_stages)]
    loads = [float(count) for count in counts]
    loads[0] += first_cost
    loads[-1] += last_cost
    rank_loads: dict[int, float] = defaultdict(float)
    for stage, load in enumerate(loads):
        rank_loads[rank_of(stage)] += load
    free = [stage for stage in range(num_stages) if stage not in fixed]
    for _ in range(num_layers - sum(fixed.values())):
        # Least loaded first; among equals one that is not an end, and a late one, as it holds fewer activations.
        cheapest = min(free, key=lambda stage: (loads[stage], rank_loads[rank_of(stage)], stage in ends, -stage))
        counts[cheapest] += 1
        loads[cheapest] += 1
        rank_loads[rank_of(cheapest)] += 1
    assert sum(counts) == num_layers, f"{counts} of {num_layers} layers"
    return list(starmap(range, pairwise(accumulate(counts, initial=0))))
