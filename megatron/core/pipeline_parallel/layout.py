"""Assignment of layers to stages and of stages to ranks. This module does not import torch.

A *stage* is a stage of the whole pipeline. The *chunks* of a rank are its local stages, in stage order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap


@dataclass(frozen=True)
class Stage:
    """Contents of one pipeline stage: global layer numbers, the embedding (first stage), and the final norm, head and
    multi-token prediction modules (last stage)."""

    layers: Sequence[int]
    first: bool = True
    last: bool = True
    tied_stages: tuple[int, ...] = ()
    """Stages on different ranks that each hold a copy of the embedding."""


@dataclass(frozen=True)
class PipelineLayout:
    """Placement of stages on ranks.

    Each rank holds `chunks` stages. Stages are placed round-robin (stage = chunk * pp + rank) or, with `v_shaped`, in a
    V, so that rank 0 holds the first and the last stage.
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
        """Return the chunk number of a stage on its rank."""
        return stage // self.pp

    def stage_of(self, rank: int, chunk: int = 0) -> int:
        """Return the stage number of chunk `chunk` on `rank`."""
        place = self.pp - 1 - rank if self.v_shaped and chunk % 2 else rank
        return chunk * self.pp + place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank in ascending order."""
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
    """Split layers into contiguous stages whose costs are as even as whole layers allow. A stage may have no layers.

    Args:
        num_layers: Number of layers to split.
        num_stages: Number of stages.
        first_cost: Cost of the embedding, as a multiple of the cost of a layer. Because of the embedding, the first
            stage gets fewer layers.
        last_cost: Cost of the head, as a multiple of the cost of a layer. Because of the head, the last stage gets
            fewer layers.
        fixed: Number of layers of individual stages, keyed by stage. The remaining layers are divided among the other
            stages.
        rank_of: Function that maps a stage to its rank. By default, each stage is on a different rank. If several
            stages have the smallest load, an extra layer goes to the stage whose rank has the smallest load. If several
            of these ranks have the same load, the layer goes to a stage in the middle.

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
        # Choose the least loaded rank. On a tie, prefer a stage in the middle, then a late stage, which holds fewer
        # activations.
        cheapest = min(free, key=lambda stage: (loads[stage], rank_loads[rank_of(stage)], stage in ends, -stage))
        counts[cheapest] += 1
        loads[cheapest] += 1
        rank_loads[rank_of(cheapest)] += 1
    assert sum(counts) == num_layers, f"{counts} of {num_layers} layers"
    return list(starmap(range, pairwise(accumulate(counts, initial=0))))
