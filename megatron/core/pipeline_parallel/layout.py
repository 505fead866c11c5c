"""Assignment of layers to stages and of stages to ranks. This module does not import torch.

A *stage* has a number that is counted over the whole pipeline. The *chunks* of a rank are the stages that the rank
holds, numbered from 0 in ascending order of their stage numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap


@dataclass(frozen=True)
class Stage:
    """Contents of one pipeline stage: the global numbers of its layers, whether it contains the embedding (`first`),
    and whether it contains the final norm, the head and the multi-token prediction modules (`last`)."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True
    tied_stages: tuple[int, ...] = ()
    """Numbers of the stages on different ranks that each hold a copy of the embedding."""


@dataclass(frozen=True)
class PipelineLayout:
    """Placement of the pipeline stages on ranks.

    Each rank holds `chunks` stages. By default, stages are placed round-robin: stage = chunk * pp + rank. If `v_shaped`
    is True, the rank order is reversed in every second chunk. With two chunks, the stages then form a V, and rank 0
    holds the first and the last stage.
    """

    pp: int = 1
    chunks: int = 1
    v_shaped: bool = False

    def __post_init__(self) -> None:
        assert self.pp >= 1 and self.chunks >= 1, f"pp {self.pp}, chunks {self.chunks}"

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage."""
        chunk, place = divmod(stage, self.pp)
        return self.pp - 1 - place if self.v_shaped and chunk % 2 else place

    def chunk_of(self, stage: int) -> int:
        """Return the number of the chunk that a stage forms on its rank."""
        return stage // self.pp

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """Return the number of the stage that is chunk `chunk` of `rank`."""
        place = self.pp - 1 - rank if self.v_shaped and chunk % 2 else rank
        return chunk * self.pp + place

    def stages_of(self, rank: int) -> list[int]:
        """Return the numbers of the stages that a rank holds, in ascending order."""
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
    """Split the layers into consecutive stages of nearly equal cost. A stage may have no layers.

    Args:
        num_layers: Number of layers to split.
        num_stages: Number of stages.
        first_cost: Cost of the embedding, as a multiple of the cost of a layer. The first stage gets fewer layers to
            compensate for this cost.
        last_cost: Cost of the head, as a multiple of the cost of a layer. The last stage gets fewer layers to
            compensate for this cost.
        fixed: Dictionary that prescribes the number of layers for individual stages, keyed by stage number. The
            remaining layers are divided among the other stages.
        rank_of: Function that maps a stage to its rank. By default, each stage is on a different rank. The layers are
            assigned one at a time to the stage with the smallest load. If several stages have the same load, the stage
            whose rank has the smallest load is chosen. If the loads of their ranks are also equal, a stage in the
            middle is chosen.

    Returns:
        The layers of each stage.
    """
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
        # Choose the least loaded stage, and among equal stages the one on the least loaded rank. If there is still a
        # tie, prefer a stage in the middle, and then a late stage, which holds fewer activations.
        cheapest = min(free, key=lambda stage: (loads[stage], rank_loads[rank_of(stage)], stage in ends, -stage))
        counts[cheapest] += 1
        loads[cheapest] += 1
        rank_loads[rank_of(cheapest)] += 1
    assert sum(counts) == num_layers, f"{counts} of {num_layers} layers"
    return list(starmap(range, pairwise(accumulate(counts, initial=0))))
