"""Which layers make a stage, and which rank runs it: integers only.

A *stage* is a global pipeline stage; a rank's local stages are its *chunks*, in the order of their stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, starmap

from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.parameters import multi_token_metas, parameter_metas
from megatron.core.param_meta import ParamMeta
from megatron.core.parts import layers_by_pattern


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


def end_costs(config: TransformerConfig) -> tuple[float, float]:
    """Costs of the embedding and the head, in layers of the mean, by their FLOPs: the embedding is a look-up and
    costs nothing. By the parameters of built-in layers, which stand for an extension's."""
    layers, head = _layer_costs(config), config.padded_vocab_size * config.hidden_size
    return 0.0, head * config.num_layers / layers if layers else 0.0


def multi_token_cost(config: TransformerConfig) -> float:
    """Cost of multi-token prediction, in layers of the mean, by its FLOPs: at each depth a projection, a layer of
    the last one's kind, and the head once more."""
    layers, depths = _layer_costs(config), config.mtp_depths
    if not layers or not depths:
        return 0.0
    modules = sum(
        _matrices([*multi_token_metas(depth, config, False)], config)
        + _attention_cost(config, config.num_layers + depth)
        for depth in range(depths)
    )
    return modules * config.num_layers / layers + depths * end_costs(config)[1]


@lru_cache(maxsize=64)
def relative_costs(config: TransformerConfig) -> tuple[float, ...]:
    """Cost of each layer of one sublayer, in layers of the mean, by its FLOPs; layers of two count as equal."""
    layers, numbers = _layer_costs(config), range(config.num_layers)
    if not layers or layers_by_pattern(config) is None:
        return (1.0,) * config.num_layers
    of_layer = (_matrices(parameter_metas(config, [number], first=False, last=False), config) for number in numbers)
    attention = (_attention_cost(config, number) for number in numbers)
    return tuple((one + other) * len(numbers) / layers for one, other in zip(of_layer, attention, strict=True))


@lru_cache(maxsize=64)
def _layer_costs(config: TransformerConfig) -> float:
    """Multiplications per token of all layers; 0 without layers."""
    matrices = _matrices(parameter_metas(config, first=False, last=False), config)
    attention = sum(_attention_cost(config, number) for number in range(config.num_layers))
    return matrices + attention if matrices else 0.0


def _attention_cost(config: TransformerConfig, number: int) -> float:
    """Multiplications per token of a layer's attention, to the tokens that it sees."""
    if not config.layer(number).attends:
        return 0.0
    own = config.of_layer(number)
    return (own.query_projection_size + own.attention_output_size) * config.layer(number).span.mean(config.seq_length)


def _matrices(metas: Sequence[ParamMeta], config: TransformerConfig) -> float:
    """Elements of the matrices that a token is multiplied by: of experts, those it is routed to."""
    matrices = sum(meta.numel for meta in metas if meta.matrix)
    experts = sum(meta.numel for meta in metas if meta.expert)
    if experts and config.num_experts:
        matrices -= experts - experts * config.moe_router_topk // config.moe_choices
    return matrices
