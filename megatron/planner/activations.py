"""Memory of activations per rank: what autograd keeps between a forward pass and its backward. No torch.

Counted storage by storage, as the modules hand tensors to autograd: a view keeps the whole of what it is a view of. So
the bytes of dense models are the allocator's, and tests compare them with those of built models. Those of experts
follow from routing; planned is an even one.

What a rank holds at once follows from its list of actions, the one that it runs: a micro-batch's activations are there
from F to B, or to I, and from there to W what the weight gradients need: inputs of linear layers and the gradients of
their outputs. `working` is an estimate of what passes through memory beside what is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.model_math import DTYPE_BYTES, Stage
from megatron.core.pipeline_parallel.schedules import build_schedule, splits_backward
from megatron.core.pipeline_parallel.simulator import StageCosts, held_at_peak
from megatron.core.pipeline_parallel.stages import pipeline_layout, pipeline_stages
from megatron.core.transformer.segments import recompute_segments

INT64, INT32, BOOL, FP32 = 8, 4, 1, 4
SCALE = FP32
"""Of an fp8 tensor."""
LOSS_CHUNK = {"cpu": 2**20, "cuda": 2**24}
"""Logits that the loss has in fp32 at a time, as `tensor_parallel.cross_entropy` has it."""


@dataclass(frozen=True)
class MicroBatch:
    """What a rank has of one micro-batch. Sizes are elements, `width` bytes of one of the model's dtype."""

    model: TransformerConfig
    parallel: ModelParallelConfig
    samples: int
    device: str = "cuda"
    """"cuda" or "cpu": some kernels keep other things there."""

    own_positions: bool = False
    """Whether samples have position ids of their own (--reset-position-ids)."""

    @property
    def tokens(self) -> int:
        """Of this rank: s/cp of each sample."""
        return self.model.seq_length // self.parallel.context_parallel_size * self.samples

    @property
    def rows(self) -> int:
        """Tokens between the linear layers: under sequence parallelism a part of them."""
        return self.tokens // self.tp if self.parallel.sequence_parallel else self.tokens

    @property
    def tp(self) -> int:
        return self.parallel.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.parallel.context_parallel_size

    @property
    def width(self) -> int:
        return DTYPE_BYTES[self.parallel.params_dtype]

    @property
    def wide(self) -> int:
        """Bytes of what 16-bit numbers are computed in."""
        return max(FP32, self.width)

    @property
    def hidden(self) -> int:
        """Bytes of hidden states between the linear layers."""
        return self.width * self.rows * self.model.hidden_size

    @property
    def queries(self) -> int:
        """Bytes of the queries, and of the output of attention."""
        return self.width * self.tokens * self.model.query_projection_size // self.tp

    @property
    def keys(self) -> int:
        """Bytes of the keys, and of the values."""
        return self.width * self.tokens * self.model.kv_projection_size // self.tp

    def fp8(self, number: int) -> bool:
        """Whether the linear layers of layer `number` multiply in fp8."""
        return number in self.parallel.fp8_layers(self.model.num_layers)

    def casts(self, number: int) -> bool:
        """Whether those keep an fp8 copy of their input, one byte an element, in place of the input."""
        return self.fp8(number) and self.parallel.fp8_recipe != "rowwise"

    @property
    def dropout_mask(self) -> int:
        """Bytes that dropout of hidden states keeps; compiled, it makes the mask again from a number for each row and
        each column."""
        if self.model.hidden_dropout == 0:
            return 0
        if self.parallel.compiles(self.device):
            return INT32 * (self.rows + self.model.hidden_size)
        return BOOL * self.rows * self.model.hidden_size


@dataclass(frozen=True)
class Kept:
    """Bytes that one layer, or one end of the model, keeps of a micro-batch, and what of it is in question."""

    norms: int = 0
    """Inputs, outputs and statistics."""
    attention: int = 0
    mlp: int = 0
    """Of the experts as well."""
    dropout: int = 0
    other: int = 0
    """Embedding, rotary tables, logits and the loss."""

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __add__(self, more: Kept) -> Kept:
        return Kept(*(a + b for a, b in zip(vars(self).values(), vars(more).values(), strict=True)))


def norm_bytes(batch: MicroBatch, rows: int, size: int) -> tuple[int, bool]:
    """(bytes of statistics and of copies, whether the input itself is kept) of a norm over `rows` rows of `size`.

    RMSNorm on CPU is several operations of torch: it keeps x / rms in fp32, and of a 16-bit x an fp32 copy.
    """
    on_gpu = batch.device == "cuda"
    if batch.model.normalization == "LayerNorm":
        return 2 * rows * (batch.wide if on_gpu else batch.width), True
    statistics = rows * batch.wide
    if on_gpu:
        return statistics, True
    copies = 1 if batch.width == batch.wide else 2
    return statistics + copies * batch.wide * rows * size, copies == 1


def layer_kept(batch: MicroBatch, number: int) -> Kept:
    """What the layer `number` keeps, its input included and its output not, without full recomputation."""
    modules, casts, moe = batch.model.recomputed_modules, batch.casts(number), number in batch.model.moe_layers
    beside, keeps_input = norm_bytes(batch, batch.rows, batch.model.hidden_size)
    output = 0 if "layernorm" in modules else batch.hidden
    # A norm that runs again needs its input, whatever else it keeps.
    inputs = batch.hidden if keeps_input or "layernorm" in modules else 0
    cast = batch.hidden // batch.width + SCALE
    outputs = (cast if casts else output) + (cast if casts and not (moe or "mlp" in modules) else output)
    attention = attention_kept(batch, casts)
    mlp = experts_kept(batch, casts) if moe else mlp_kept(batch, batch.model.ffn_size, casts)
    return Kept(2 * (inputs + beside) + outputs, attention, mlp, 2 * batch.dropout_mask)


def attention_kept(batch: MicroBatch, casts: bool = False) -> int:
    """Bytes from the output of the query-key-value projection to the input of the one back."""
    model = batch.model
    qkv = batch.queries + 2 * batch.keys
    sizes = {"qkv": qkv, "q": batch.queries, "q norm": batch.queries, "k norm": batch.keys}
    sizes |= {"q rotated": batch.queries, "k rotated": batch.keys, "gathered": 2 * batch.keys * batch.cp}
    sizes |= {"v": batch.keys, "swapped": qkv, "swapped out": batch.queries}
    kept: set[str] = set()
    # The queries of several groups lie apart among keys and values, so that flattening their heads copies them.
    apart = model.queries_per_group > 1 and model.query_groups // batch.tp > 1
    q, k, v = "q" if apart else "qkv", "qkv", "qkv"
    beside = 0
    if model.qk_layernorm:
        for elements, source in ((batch.queries, q), (batch.keys, k)):
            statistics, keeps_input = norm_bytes(batch, elements // batch.width // model.head_dim, model.head_dim)
            beside += statistics
            kept |= {source} if keeps_input else set()
        q, k = "q norm", "k norm"
    if model.position_embedding_type == "rope":
        q, k, v = "q rotated", "k rotated", v if model.qk_layernorm else "v"
    heads = model.num_attention_heads // batch.tp
    way = batch.parallel.cp_comm_type if batch.cp > 1 else "p2p"
    cast = batch.queries // batch.width + SCALE
    if "core_attn" in model.recomputed_modules:
        return beside + (cast if casts else batch.queries) + sum(sizes[name] for name in kept | {q, k, v})
    beside += batch.queries + (cast if casts else 0)  # the output
    if casts and way == "a2a":
        beside -= batch.queries  # what was swapped back is cast, and kept by nothing else
    beside += batch.wide * batch.tokens * heads  # log-sum-exps
    operands = {"p2p": {q, k, v}, "all_gather": {q, "gathered"}, "a2a": {"swapped", "swapped out"}}[way]
    return beside + sum(sizes[name] for name in kept | operands)


def mlp_kept(batch: MicroBatch, ffn: int, casts: bool) -> int:
    """Bytes behind the first linear layer of an MLP."""
    if "mlp" in batch.model.recomputed_modules:
        return 0
    return activation_kept(batch, batch.width * batch.tokens * ffn // batch.tp, casts)


def activation_kept(batch: MicroBatch, width: int, casts: bool = False, only_input: bool = False) -> int:
    """Bytes that an activation function keeps, `width` being those of its output, and the linear layer behind it.

    relu(x)^2 keeps relu(x) in place of x, but needs x to run again, unless it is made to keep `only_input`.
    """
    model = batch.model
    again = "mlp_act" in model.recomputed_modules
    kept = 2 * width if model.activation == "swiglu" else width
    if again and model.activation == "squared_relu" and not only_input:
        kept += width
    if casts:
        return kept + width // batch.width + SCALE
    return kept if again else kept + width


def routed_rows(batch: MicroBatch) -> int:
    """Rows that the experts of a rank get if all experts get equally many: copies of tokens of its expert group."""
    return batch.rows * batch.model.moe_router_topk * batch.parallel.expert_tp


def route_bytes(batch: MicroBatch) -> int:
    """Bytes of the indices by which tokens go to experts and back. They stay where the layer is recomputed, too."""
    return (4 if batch.parallel.expert_model_parallel_size == 1 else 2) * (INT64 * routed_rows(batch))


def router_kept(batch: MicroBatch) -> int:
    """Bytes of scores, probabilities and choices of a router."""
    model, k = batch.model, batch.model.moe_router_topk
    of_experts, of_token = 1, 0  # numbers for each expert, and beside them, that a token keeps
    if model.moe_router_score_function == "sigmoid":
        of_token += k + (k > 1)
    elif not model.moe_router_pre_softmax:
        of_token += k
    of_experts += model.moe_aux_loss_coeff != 0 and model.moe_router_load_balancing_type != "none"
    of_experts += model.moe_z_loss_coeff != 0 and model.moe_router_pre_softmax
    of_token += model.moe_z_loss_coeff != 0
    experts = model.num_experts or 0
    return batch.rows * (experts * (INT64 + of_experts * batch.wide) + of_token * batch.wide)


def experts_kept(batch: MicroBatch, casts: bool) -> int:
    """Bytes of a mixture of experts, the norm's output before it excluded, if all experts get equally many tokens."""
    model, rows = batch.model, routed_rows(batch)
    if "mlp" in model.recomputed_modules:
        return route_bytes(batch)
    width = batch.width * rows * model.moe_ffn_size // batch.parallel.expert_tp
    experts = (
        batch.width * rows * model.hidden_size + activation_kept(batch, width, only_input=True) + rows * batch.wide
    )
    total = experts + router_kept(batch) + route_bytes(batch)
    shared = model.moe_shared_expert_intermediate_size
    if shared:
        total += mlp_kept(batch, shared, casts) + (batch.hidden // batch.width + SCALE if casts else 0)
    return total


def rotary_tables(batch: MicroBatch) -> int:
    """Bytes of cosines and sines, which all layers of a stage share."""
    if batch.model.position_embedding_type != "rope":
        return 0
    channels = -(-int(batch.model.head_dim * batch.model.rotary_percent) // 2)
    positions = batch.tokens if batch.own_positions else batch.tokens // batch.samples
    return 2 * batch.width * positions * channels


def ends_kept(batch: MicroBatch, stage: Stage) -> Kept:
    """What embedding, final norm, head and loss of a stage keep; tokens, labels and loss masks are the batch's."""
    kept = Kept()
    if stage.first:
        ids = (INT64 + BOOL) * batch.tokens if batch.tp > 1 else 0
        kept += Kept(dropout=batch.dropout_mask, other=ids)
    if stage.last:
        beside, keeps_input = norm_bytes(batch, batch.rows, batch.model.hidden_size)
        logits = batch.width * batch.tokens * batch.model.padded_vocab_size // batch.tp
        of_tokens = (INT64 + BOOL + 2 * batch.wide) * batch.tokens  # local labels, whose they are, maximum, sum
        kept += Kept(norms=beside + batch.hidden * (1 + keeps_input), other=logits + of_tokens)
    return kept


def stage_kept(batch: MicroBatch, stage: Stage) -> Kept:
    """What a stage keeps of one micro-batch from its forward pass to its backward."""
    kept = ends_kept(batch, stage)
    if stage.layers:
        kept += Kept(other=rotary_tables(batch))
    segments = recompute_segments(batch.model, len(stage.layers))
    for segment in segments:
        if segment.recompute:
            routed = sum(stage.layers[index] in batch.model.moe_layers for index in segment.layers)
            kept += Kept(mlp=routed * route_bytes(batch), other=batch.hidden)
        else:
            for index in segment.layers:
                kept += layer_kept(batch, stage.layers[index])
    # The executor holds what a stage was sent until its backward, where no norm does.
    norm_holds = norm_bytes(batch, 1, 1)[1] or "layernorm" in batch.model.recomputed_modules
    begins_kept = segments[0].recompute if segments else False
    if not stage.first and not (norm_holds or begins_kept):
        kept += Kept(other=batch.hidden)
    return kept


def kept_for_weights(batch: MicroBatch, stage: Stage) -> int:
    """Bytes that remain between I and W: inputs of the linear layers, and gradients of their outputs."""
    model = batch.model
    factor = 3 if model.gated else 2
    total = 0
    for number in stage.layers:
        width, scales = (1, SCALE) if batch.casts(number) else (batch.width, 0)
        hidden, whole = batch.rows * model.hidden_size, batch.tokens * model.hidden_size
        attention = hidden + 2 * (batch.queries + batch.keys) // batch.width + whole
        total += width * attention + 4 * scales
        ffn = model.ffn_size
        if number in model.moe_layers:
            rows = routed_rows(batch)
            experts = 2 * rows * model.hidden_size + rows * model.moe_ffn_size // batch.parallel.expert_tp * factor
            total += batch.width * (experts + hidden)
            ffn = model.moe_shared_expert_intermediate_size or 0
        if ffn:
            total += width * (hidden + whole + batch.tokens * ffn // batch.tp * factor) + 4 * scales
            total -= batch.hidden if number in model.moe_layers and not scales else 0  # the router's input is the same
    if stage.last:
        total += batch.hidden + batch.width * batch.tokens * model.padded_vocab_size // batch.tp
    return total


def weight_copies(batch: MicroBatch, stage: Stage) -> int:
    """Bytes of the fp8 copies of weights that a step makes, once for all micro-batches: as they lie and transposed."""
    model, tp = batch.model, batch.tp
    h, projected = model.hidden_size, model.query_projection_size // tp
    total = 0
    for number in stage.layers:
        if not batch.fp8(number):
            continue
        ffn = model.moe_shared_expert_intermediate_size if number in model.moe_layers else model.ffn_size
        matrices = [(projected + 2 * model.kv_projection_size // tp, h), (h, projected)]
        matrices += [(ffn // tp * (2 if model.gated else 1), h), (h, ffn // tp)] if ffn else []
        for out, size_in in matrices:
            scales = SCALE if batch.parallel.fp8_recipe != "rowwise" else SCALE * (out + size_in)
            total += 2 * out * size_in + scales
    return total


def working_bytes(batch: MicroBatch, stage: Stage) -> int:
    """An estimate of what a stage needs beside what is kept, at its largest: in the loss and the head, or in a layer,
    by which time what the last stage's end kept has gone."""
    model, split = batch.model, splits_backward(batch.parallel.schedule)
    whole = batch.width * batch.tokens * model.hidden_size
    head = of_layers = 0
    if stage.last:
        columns = model.padded_vocab_size // batch.tp
        chunk = min(LOSS_CHUNK[batch.device], batch.tokens * columns)
        # On CPU a weight gradient is made in 16 bits before it is added up.
        product = batch.width * columns * model.hidden_size if batch.device == "cpu" and batch.width == 2 else 0
        head = max(batch.wide * chunk, 2 * whole + product)
    if stage.layers:
        of_layers = layer_working(batch, stage)
        if split:
            of_layers += kept_for_weights(batch, replace(stage, layers=stage.layers[:1], last=False))
        elif stage.last:
            of_layers -= ends_kept(batch, replace(stage, first=False)).total
    return max(head, of_layers)


def layer_working(batch: MicroBatch, stage: Stage) -> int:
    """The gradients of the widest part of a layer, and what is recomputed for it."""
    model = batch.model
    whole = batch.width * batch.tokens * model.hidden_size
    ffn = batch.width * batch.tokens * max(model.ffn_size, model.moe_ffn_size * model.moe_router_topk) // batch.tp
    widest = 2 * whole + max(ffn * (6 if model.gated else 3), attention_working(batch))
    plain = replace(batch, model=replace(model, recompute_granularity=None, recompute_modules=None))
    if model.recompute_granularity == "full":
        again = [s for s in recompute_segments(model, len(stage.layers)) if s.recompute]
        return widest + max(sum(layer_kept(plain, stage.layers[i]).total for i in s.layers) for s in again)
    return widest + max(layer_kept(plain, n).total - layer_kept(batch, n).total for n in stage.layers)


def attention_working(batch: MicroBatch) -> int:
    """Gradients of queries, keys, values and output; with dropout of attention weights also whole tiles of scores."""
    model, gradients = batch.model, 2 * batch.queries + 2 * batch.keys
    if model.attention_dropout == 0 and batch.cp == 1 and model.window_size is None:
        return gradients
    gradients += (batch.queries + 2 * batch.keys) // batch.width * batch.wide
    if model.attention_dropout == 0:
        return gradients
    side = model.seq_length // (2 * batch.cp if batch.cp > 1 else 1)
    scores = batch.samples * model.num_attention_heads // batch.tp * side * side
    return gradients + 5 * scores * batch.wide


@dataclass(frozen=True)
class RankActivations:
    """What each rank at one place of the pipeline holds at most of a step's activations."""

    stages: tuple[Kept, ...]
    """Of one micro-batch, by chunk."""

    for_weights: tuple[int, ...]
    """Of one micro-batch between I and W, by chunk."""

    in_flight: tuple[int, ...]
    """Micro-batches whose activations are held at the peak, by chunk."""

    peak: int
    """Bytes kept at once."""

    working: int
    """Estimate of what passes through memory beside."""

    weight_copies: int = 0
    """Bytes of weights in fp8."""

    @property
    def total(self) -> int:
        return self.peak + self.weight_copies + self.working


def activations_of_ranks(batch: MicroBatch, microbatches: int) -> list[RankActivations]:
    """By pipeline rank, for steps of so many micro-batches."""
    model, parallel = batch.model, batch.parallel
    layout, stages = pipeline_layout(model, parallel), pipeline_stages(model, parallel)
    kept = [stage_kept(batch, stage) for stage in stages]
    weights = [kept_for_weights(batch, stage) for stage in stages]
    share = [after / max(1, before.total) for after, before in zip(weights, kept, strict=True)]
    costs = StageCosts(activation=[part.total for part in kept], kept_for_weight_grad=share)
    found = []
    for rank, actions in enumerate(build_schedule(parallel.schedule, layout.pp, microbatches, layout.chunks)):
        own: Sequence[int] = layout.stages_of(rank)
        peak, held = held_at_peak(actions, costs)
        found.append(
            RankActivations(
                tuple(kept[stage] for stage in own),
                tuple(weights[stage] for stage in own),
                tuple(held.get(stage, 0) for stage in own),
                round(peak),
                max(working_bytes(batch, stages[stage]) for stage in own),
                sum(weight_copies(batch, stages[stage]) for stage in own),
            )
        )
    return found
