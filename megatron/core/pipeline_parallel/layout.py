"""Which layers make a stage, and which rank runs it: integers only.

A *stage* is a global pipeline stage; a rank's local stages are its *chunks*, in the order of their stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.config import TransformerConfig
from megatron.core.model_math import flops_per_token


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
    first_layers: int | None = None,
    last_layers: int | None = None,
) -> list[range]:
    """The layers of each stage: contiguous, each layer exactly once, costs as even as whole layers allow.

    `first_cost` and `last_cost` are what the embedding and the head cost, in layers; they make the ends shorter.
    Where stages tie, those in the middle get the extra layer. `first_layers` and `last_layers` fix the ends and
    leave the rest to the others. A stage may end up without layers. Raises ValueError on counts that do not fit.
    """
    _check_counts(num_layers, num_stages, first_layers, last_layers)
    fixed = {stage: n for stage, n in ((0, first_layers), (num_stages - 1, last_layers)) if n is not None}
    costs = [0.0] * num_stages
    costs[0] += first_cost
    costs[-1] += last_cost
    counts = [fixed.get(stage, 0) for stage in range(num_stages)]
    free = [stage for stage in range(num_stages) if stage not in fixed]
    for _ in range(num_layers - sum(fixed.values())):
        # Least loaded first; among equals one that is not an end, and a late one, as it holds fewer activations.
        cheapest = min(free, key=lambda stage: (costs[stage] + counts[stage], stage in (0, num_stages - 1), -stage))
        counts[cheapest] += 1
    return _ranges(counts, num_layers)


def _check_counts(num_layers: int, num_stages: int, first_layers: int | None, last_layers: int | None) -> None:
    flags = (("--decoder-first-pipeline-num-layers", first_layers), ("--decoder-last-pipeline-num-layers", last_layers))
    fixed = [n for _, n in flags if n is not None]
    for name, n in flags:
        if n is not None and not 0 <= n <= num_layers:
            raise ValueError(f"{name} {n} must be between 0 and --num-layers {num_layers}")
    ends_only = len(fixed) == num_stages == 2
    if num_stages == 1 and any(n != num_layers for n in fixed):
        raise ValueError(f"{next(name for name, n in flags if n is not None)} needs more than one pipeline stage")
    if num_stages > 1 and (sum(fixed) > num_layers or (ends_only and sum(fixed) != num_layers)):
        rule = "add up to" if ends_only else "add up to at most"
        raise ValueError(f"{flags[0][0]} and {flags[1][0]} {fixed} must {rule} --num-layers {num_layers}")


def _ranges(counts: Sequence[int], num_layers: int) -> list[range]:
    stops = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    ranges = [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]
    assert [layer for part in ranges for layer in part] == list(range(num_layers)), f"{counts} of {num_layers} layers"
    return ranges


def end_costs(config: TransformerConfig) -> tuple[float, float]:
    """What the embedding and the head cost, in layers, by their FLOPs: the embedding is a look-up and costs nothing."""
    head = flops_per_token(replace(config, num_layers=0))
    layer = flops_per_token(replace(config, num_layers=1)) - head
    return 0.0, head / layer
