"""Vocabulary-parallel word embeddings, with their norm, position embeddings and dropout."""

from __future__ import annotations

from dataclasses import replace
from math import frexp, ldexp, log, sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.batch import BatchContext
from megatron.core.config.model import TransformerConfig
from megatron.core.parallel_state import Axis
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.layers import (
    Boundary,
    TPContext,
    check_ids,
    local_rows,
    make_parameter,
    row_boundary,
)
from megatron.core.tensor_parallel.linear_spec import sequence_partial
from megatron.core.tensor_parallel.weight_grad import accumulate_weight_grad, add_rows_
from megatron.core.torch_private import AutogradContext
from megatron.core.transformer.layer import HiddenDropout
from megatron.core.transformer.norm import build_norm


class EmbeddingContext(AutogradContext):
    elsewhere: Tensor | None
    """Mask that is True for token ids whose embedding rows are on other ranks. None if this rank has all rows."""
    weight: Tensor
    boundary: Boundary
    axis: Axis


class EmbeddingFunction(torch.autograd.Function):
    """Look up ids in a row-sharded embedding table. Each rank looks up the ids whose rows it holds, and returns zeros
    for all other ids. The embeddings are the sum of the results of all ranks.

    The backward pass adds the gradient of each looked-up row directly to `weight.main_grad`, so no gradient tensor of
    the size of the table is allocated.
    """

    # Shapes: ids [s, b] and table W [V/t, h] -> embeddings [s, b, h], or [s/t, b, h] under sequence parallelism
    @staticmethod
    def forward(ctx: EmbeddingContext, ids: Tensor, weight: Tensor, boundary: Boundary, axis: Axis) -> Tensor:
        start, stop = local_rows(weight.shape[0] * axis.size, axis)
        ctx.elsewhere = None
        if axis.size > 1:
            ctx.elsewhere = ((ids < start) | (ids >= stop)).unsqueeze(-1)
            ids = (ids - start).clamp_(0, stop - start - 1)
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.boundary = boundary
        ctx.axis = axis
        rows = F.embedding(ids, weight)
        if ctx.elsewhere is not None:
            rows.masked_fill_(ctx.elsewhere, 0.0)
        return boundary.leave(rows, axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: EmbeddingContext, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        (ids,) = ctx.saved_tensors
        dy = ctx.boundary.leave_adjoint(grad_output, ctx.axis).wait()
        if ctx.elsewhere is not None:
            dy = dy.masked_fill(ctx.elsewhere, 0.0)

        def add_dw_(out: Tensor, overwrite: bool) -> None:
            add_rows_(out.zero_() if overwrite else out, ids.flatten(), dy.flatten(0, -2))

        return None, accumulate_weight_grad(ctx.weight, add_dw_), None, None


class VocabParallelEmbedding(nn.Module):
    """Word embeddings [vocab_rows, hidden]. The rows of the table, including padding rows, are sharded over the
    tensor-parallel ranks."""

    backward_reads_parameters = False

    def __init__(self, meta: ParamMeta, ctx: TPContext) -> None:
        super().__init__()
        self.weight = make_parameter(meta, ctx)
        self.vocab_rows = meta.global_shape[0]
        self.axis = ctx.tp
        self.boundary = row_boundary(ctx)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the word embeddings of the tokens: tokens [b, s] -> [s, b, h], or [s/t, b, h] under sequence
        parallelism. Each of the t tensor-parallel ranks holds V/t rows of the table, W [V/t, h]. A token id outside the
        vocabulary raises ValueError."""
        check_ids(tokens, self.vocab_rows, "token ids")
        return EmbeddingFunction.apply(tokens.t(), self.weight, self.boundary, self.axis)


def word_embedding_meta(config: TransformerConfig, tied_stages: tuple[int, ...]) -> ParamMeta:
    """Return the `ParamMeta` of the word embedding weight. In models with tied embeddings, the output layer uses the
    same weight."""
    shared_stages = tied_stages if config.tied_embeddings or config.mtp_depths else ()
    return ParamMeta(
        "embedding.word_embeddings.weight",
        (config.padded_vocab_size, config.hidden_size),
        {"tp": 0},
        shared_stages=shared_stages,
        role="embedding",
        tied=config.tied_embeddings,
    )


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round a positive number to the nearest value that `dtype` can represent. For example, Gemma was trained with an
    embedding scale that was rounded to bfloat16."""
    fraction, exponent = frexp(value)
    one = 2 / torch.finfo(dtype).eps
    return ldexp(round(fraction * one) / one, exponent)


class PositionEmbedding(nn.Module):
    """Learned position embeddings, replicated on every rank.

    Under sequence parallelism, each rank looks up only the positions of the tokens in its sequence shard.
    """

    backward_reads_parameters = False

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        rows = config.max_positions + config.position_offset
        shape = (rows, config.hidden_size)
        partial_over = sequence_partial(ctx.sequence_parallel)
        name = "embedding.position_embeddings.weight"
        meta = ParamMeta(name, shape, partial_over=partial_over, role="embedding")
        self.weight = make_parameter(meta, ctx)
        self.shard, self.offset = ctx.tp.rank if ctx.sequence_parallel else 0, config.position_offset

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the position embeddings [n, 1 or b, h] of the rank's tokens x [n, b, h]. A token whose position is
        beyond the last row of the table raises ValueError."""
        if context.position_ids is not None or context.places is not None:
            return F.embedding(positions_of(x, context, self.shard) + self.offset, self.weight)
        rows = self.weight.shape[0] - self.offset
        start = self.shard * x.shape[0]
        length = x.shape[0]
        if start + length > rows:
            raise ValueError(
                f"position {start + length - 1} is beyond --max-position-embeddings {rows}: "
                f"the table of learned positions ends there; use at most {rows} tokens"
            )
        return self.weight[self.offset + start : self.offset + start + length].unsqueeze(1)


class SinusoidalEmbedding(nn.Module):
    """Sinusoidal position embedding (arXiv:1706.03762, section 3.5): h / 2 sines followed by h / 2 cosines.

    The frequencies decrease geometrically from 1 to 1 / 10000. tensor2tensor and XGLM use the same order and the same
    frequencies. With --position-embedding-type sinusoidal_ctrl, the last frequency is 10000^(2 / h) / 10000, as in
    CTRL. Angles are computed in fp32.
    """

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        super().__init__()
        self.pairs, self.offset = config.hidden_size // 2, config.position_offset
        self.steps = self.pairs - 1 if config.position_embedding_type == "sinusoidal" else self.pairs
        self.shard = ctx.tp.rank if ctx.sequence_parallel else 0

    def forward(self, x: Tensor, context: BatchContext) -> Tensor:
        """Return the position embeddings [n, 1 or b, h] of the rank's tokens x [n, b, h]."""
        exponents = torch.arange(self.pairs, device=x.device).float() * -(log(10000) / self.steps)
        angles = (positions_of(x, context, self.shard) + self.offset).float().unsqueeze(-1) * exponents.exp()
        return torch.cat((angles.sin(), angles.cos()), dim=-1).to(x.dtype)


def positions_of(x: Tensor, context: BatchContext, shard: int) -> Tensor:
    """Return the positions [n, 1 or b] of the tokens x [n, b, h]. The tokens of a context-parallel rank are divided
    into shards of n tokens, and `shard` is the index of the shard that x contains."""
    if context.position_ids is None:
        return context.places_of(x, shard).unsqueeze(1)
    return context.position_ids[:, shard * x.shape[0] : (shard + 1) * x.shape[0]].t()


POSITIONS = {
    "learned_absolute": PositionEmbedding,
    "sinusoidal": SinusoidalEmbedding,
    "sinusoidal_ctrl": SinusoidalEmbedding,
}


class Embedding(nn.Module):
    """The model's input layer: word and position embeddings, norm and dropout.

    `tied_stages` lists the pipeline stages on different ranks that each hold a copy of the word embeddings. With
    multi-token prediction, each of these stages holds a copy of the whole embedding.
    """

    def __init__(self, config: TransformerConfig, ctx: TPContext, tied_stages: tuple[int, ...]) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(word_embedding_meta(config, tied_stages), ctx)
        root = rounded(sqrt(config.hidden_size), ctx.dtype) if config.scale_word_embeddings else 1.0
        self.scale = root * config.embedding_multiplier
        self.layernorm = (
            build_norm("embedding.layernorm", config.hidden_size, config, ctx)
            if config.embed_layernorm
            else nn.Identity()
        )
        kind = POSITIONS.get(config.position_embedding_type)
        self.position_embeddings = None if kind is None else kind(config, ctx)
        if config.mtp_depths:
            for parameter in self.parameters():
                parameter.meta = replace(parameter.meta, shared_stages=tied_stages)  # type: ignore[attr-defined]
        self.dropout = HiddenDropout("embedding.dropout", config.hidden_dropout, ctx)

    def forward(self, tokens: Tensor, context: BatchContext) -> Tensor:
        """Return the embeddings of the tokens: tokens [b, s] -> [s, b, h], or [s/tp, b, h] under sequence
        parallelism."""
        return self.dropout(self.vectors(tokens, context), context)

    def vectors(self, tokens: Tensor, context: BatchContext) -> Tensor:
        """Return the embeddings before dropout. The arguments and the shape of the result are the same as in
        `forward`."""
        x = self.word_embeddings(tokens)
        x = self.layernorm(x if self.scale == 1 else x * self.scale)
        if self.position_embeddings is not None:
            x = x + self.position_embeddings(x, context)
        return x
