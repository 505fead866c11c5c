"""The layouts that a search considers: sizes that divide what they cut, by integers alone. No torch.

A layout is legal if validation says so. What is generated here merely divides, so that little of it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.parts import SHARDING_STRATEGIES

RECOMPUTATION = ("none", "selective", "full")
"""What layers compute again in the backward, from the least to the most."""

SHARDING = tuple(name for name in ("optim", "optim_grads", "optim_grads_params") if name in SHARDING_STRATEGIES)
"""What data-parallel ranks shard: ZeRO-1 to ZeRO-3. Each takes less memory than the one before, and no less time."""

OFFLOADING = ("none", "states", "activations")
"""What waits in host memory: nothing, optimizer states, or the activations of all layers of a stage but one."""


CHUNKS = (2, 3, 4, 5, 6, 8, 12, 16)
"""Stages of a rank in schedules that take any number."""


class Family(NamedTuple):
    """Layouts whose layers do the same with a micro-batch. Sequence parallelism comes with tensor parallelism."""

    tp: int
    cp: int
    ep: int
    expert_tp: int
    micro_batch: int
    recompute: str
    split: bool
    """Whether weight gradients are computed apart, as zero-bubble schedules do."""

    @property
    def plain(self) -> Family:
        """The one that computes nothing again and nothing apart."""
        return self._replace(recompute="none", split=False)


class ScheduleKind(NamedTuple):
    """A pipeline schedule. `chunks` are the stages of a rank; 0 stands for any number above 1."""

    name: str
    chunks: int = 1
    v_shaped: bool = False
    split: bool = False


class Pipeline(NamedTuple):
    """A schedule of `chunks` stages on each of `ranks` pipeline ranks."""

    schedule: str
    ranks: int
    chunks: int
    v_shaped: bool = False


class Saving(NamedTuple):
    """How a layout saves memory beside recomputation: entries of `SHARDING` and `OFFLOADING`."""

    sharding: str = SHARDING[0]
    offload: str = OFFLOADING[0]

    def next(self, replicas: int) -> Iterator[Saving]:
        """What saves one step more. Each takes at least as long, so that it is worth a look only where this one does
        not fit."""
        place = SHARDING.index(self.sharding) + 1
        if replicas > 1 and place < len(SHARDING):
            yield Saving(SHARDING[place], self.offload)
        if self.offload == "none":
            yield from (Saving(self.sharding, offload) for offload in OFFLOADING[1:])


class Layout(NamedTuple):
    """A family on a pipeline, `dp` times."""

    family: Family
    pipeline: Pipeline
    dp: int
    saving: Saving = Saving()

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts layouts of equal time: fewer ranks for a model, simpler schedules, less recomputation first."""
        f, p = self.family, self.pipeline
        sizes = f.tp * f.cp * p.ranks, p.ranks, f.tp, f.cp, f.ep, f.expert_tp, p.chunks, f.split, p.schedule
        saving = SHARDING.index(self.saving.sharding), OFFLOADING.index(self.saving.offload)
        return *sizes, f.micro_batch, RECOMPUTATION.index(f.recompute), *saving

    @property
    def shape(self) -> tuple[object, ...]:
        """The parallel sizes and the micro-batch: what layouts have in common that differ in their schedule, virtual
        stages, recomputation, sharding and offloading alone."""
        return self.family._replace(recompute="", split=False), self.pipeline.ranks


@dataclass(frozen=True)
class Space:
    """What is searched for one model on one cluster."""

    world_size: int
    num_layers: int
    num_attention_heads: int
    seq_length: int
    global_batch_size: int
    schedules: tuple[ScheduleKind, ...]
    """Schedules of several pipeline ranks."""

    num_experts: int | None = None
    recompute: tuple[str, ...] = RECOMPUTATION
    most_tp: int = 8
    most_samples: int = 8
    """Of a micro-batch."""

    fewest_tokens: int = 512
    """Of a context-parallel rank."""

    @property
    def record(self) -> dict[str, Any]:
        """As JSON."""
        return {**vars(self), "schedules": [kind.name for kind in self.schedules]}

    @property
    def tp_sizes(self) -> list[int]:
        """Tensor-parallel sizes that divide the world and the heads."""
        return [tp for tp in divisors(self.world_size, self.most_tp) if self.num_attention_heads % tp == 0]

    @property
    def micro_batches(self) -> list[int]:
        """Sizes of micro-batches that divide the global batch."""
        return list(divisors(self.global_batch_size, self.most_samples))

    def families(self) -> Iterator[Family]:
        """Every family that has a layout."""
        splits = sorted({False, *(kind.split for kind in self.schedules)})
        for tp in self.tp_sizes:
            for cp in self._context_sizes(self.world_size // tp):
                for ep, expert_tp in self._expert_sizes(tp):
                    for samples in self.micro_batches:
                        for again in self.recompute:
                            for split in splits:
                                family = Family(tp, cp, ep, expert_tp, samples, again, split)
                                if any(self.layouts(family)):
                                    yield family

    def layouts(self, family: Family) -> Iterator[Layout]:
        """The layouts of a family."""
        cluster = self.world_size // (family.tp * family.cp)
        for ranks in divisors(cluster, self.num_layers):
            dp = cluster // ranks
            if self.world_size // ranks % (family.ep * family.expert_tp) == 0 and not (
                self.global_batch_size % (dp * family.micro_batch)
            ):
                for pipeline in self._pipelines(ranks, family.split):
                    yield Layout(family, pipeline, dp)

    def _pipelines(self, ranks: int, split: bool) -> Iterator[Pipeline]:
        if ranks == 1:
            if not split:
                yield Pipeline("1f1b", 1, 1)
            return
        for kind in self.schedules:
            most = self.num_layers // ranks
            if kind.split is split:
                for chunks in CHUNKS if kind.chunks == 0 else (kind.chunks,):
                    if chunks <= most:
                        yield Pipeline(kind.name, ranks, chunks, kind.v_shaped)

    def _context_sizes(self, ranks: int) -> Iterator[int]:
        for cp in divisors(ranks, self.seq_length // self.fewest_tokens):
            if cp == 1 or self.seq_length % (2 * cp) == 0:
                yield cp

    def _expert_sizes(self, tp: int) -> Iterator[tuple[int, int]]:
        """(EP, tensor parallelism of experts)."""
        if self.num_experts is None:
            yield 1, tp
            return
        for ep in divisors(self.num_experts, self.world_size):
            for expert_tp in sorted({1, tp}):
                if self.world_size % (ep * expert_tp) == 0:
                    yield ep, expert_tp


def divisors(number: int, most: int | None = None) -> list[int]:
    """The divisors of a number, ascending, at most `most`; 1 is always one of them."""
    most = number if most is None else max(1, min(most, number))
    return [size for size in range(1, most + 1) if number % size == 0]
