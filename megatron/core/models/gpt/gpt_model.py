"""GPT model, built as one or more pipeline stages. A stage that contains the embedding, all layers and the head is a
complete model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron.core.batch import Batch, BatchContext, EarlierTokens
from megatron.core.collectives import all_gather
from megatron.core.config.losses import LOSSES, chunk_size
from megatron.core.config.model import TransformerConfig
from megatron.core.config.parallel import ModelParallelConfig
from megatron.core.init import has_storage, initialize_parameters_
from megatron.core.models.gpt.embedding import Embedding
from megatron.core.models.gpt.loss import Head, masked_sum
from megatron.core.models.gpt.loss_chunks import Chunking, Tokens, loss_sum_in_chunks
from megatron.core.models.gpt.multi_token import MULTI_TOKEN, MultiTokenPrediction
from megatron.core.parallel_state import ParallelState
from megatron.core.param_meta import InitRule, ParamMeta
from megatron.core.pipeline_parallel.layout import Stage
from megatron.core.tensor_parallel.layers import Hardware, TPContext
from megatron.core.tensor_parallel.linear_formats import build_format
from megatron.core.transformer.block import TransformerBlock
from megatron.core.transformer.pass_context import PassContext


@dataclass(frozen=True)
class WeightSetup:
    """Settings for creating a stage's parameters."""

    device: torch.device | str = "cpu"
    seed: int = 1234
    """Seed of the initial weights."""

    initialize: bool = True
    """If True, initialize the weights with random numbers. Pass False if weights are loaded afterwards."""

    lazy: bool = False
    """If True, parameters are created without storage, and `DistributedDataParallel` allocates them later."""

    threads: int = 1
    """Number of threads that generate the random initial weights."""

    rules: Sequence[InitRule] = ()
    """Rules of `OptimizerConfig.parameter_rules` that change the initial values of certain parameters."""


ORDINARY = WeightSetup()


def layer_context(
    config: TransformerConfig,
    parallel: ModelParallelConfig,
    state: ParallelState,
    passes: PassContext,
    weights: WeightSetup,
    hardware: Hardware,
) -> TPContext:
    """Return the `TPContext` that is passed to the constructors of all layers of a stage.

    Args:
        config: The model.
        parallel: Parallelism settings.
        state: Process groups.
        passes: State that is shared by all forward and backward passes of all stages on the rank.
        weights: Settings for creating the parameters.
        hardware: Capabilities of the stage's device.
    """
    device = torch.device(weights.device)
    return TPContext(
        state=state,
        sequence_parallel=parallel.sequence_parallel,
        dtype=getattr(torch, parallel.params_dtype),
        device=device,
        queue=passes.queue,
        pair=passes.pair,
        cp_comm_type=parallel.cp_comm_type,
        attention_backend=parallel.attention_backend,
        hardware=replace(hardware, compiled=parallel.compiles(device.type)),
        format=build_format(parallel, config.num_layers, config.mtp_depths, passes.casts),
        seed=weights.seed,
        lazy=weights.lazy,
        initial=replace(config.initial, rules=weights.rules),
        extension_options=parallel.extension_options,
    )


class GPTModel(nn.Module):
    """One pipeline stage of a GPT model. By default, the stage contains the whole model.

    Each stage holds some of the layers. The first stage also holds the embedding, and the last stage also holds the
    final norm and the head.

    Hidden states are [s, b, w], or [s/tp, b, w] under sequence parallelism, where w is the width of the residual
    stream. The first stage receives None instead of hidden states, and embeds the batch's tokens. A model that has all
    layers and no process groups (`ParallelState()`) can be used like any `nn.Module` in a single process.

    With tied embeddings or multi-token prediction, the last stage also needs the embedding. If the first and last stage
    are on different ranks, each stage of `Stage.tied_stages` holds a copy of the embedding. If the first and last stage
    are on the same rank, the last stage uses the `embedding` module of the first stage.
    """

    def __init__(
        self,
        config: TransformerConfig,
        parallel: ModelParallelConfig | None = None,
        state: ParallelState | None = None,
        stage: Stage | None = None,
        *,
        embedding: Embedding | None = None,
        passes: PassContext | None = None,
        weights: WeightSetup = ORDINARY,
        hardware: Hardware | None = None,
    ) -> None:
        """Build a stage.

        Args:
            config: The model.
            parallel: Parallelism settings. The default is the settings for a single process.
            state: Process groups. By default, no process groups are used.
            stage: Stage to build. None builds the whole model.
            embedding: Embedding of the first stage. Pass it to the last stage if both stages are on the same rank.
            passes: State that is shared by all stages on the rank.
            weights: Settings for creating the parameters.
            hardware: Capabilities of the stage's device.
        """
        super().__init__()
        parallel = parallel or ModelParallelConfig()
        state = state or ParallelState()
        passes = passes or PassContext()
        stage = stage or Stage(range(config.num_layers))
        layers = tuple(stage.layers)
        first = stage.first
        last = stage.last
        assert all(0 <= number < config.num_layers for number in layers), f"{layers} of {config.num_layers}"
        ctx = layer_context(config, parallel, state, passes, weights, hardware or Hardware())
        self.config = config
        self.tp = state.tp
        self.first = first
        self.last = last
        self.sequence_parallel = parallel.sequence_parallel and state.tp.size > 1
        self.compiled = ctx.compiled
        needed = holds_embedding(config, first, last)
        self.embedding = (embedding or Embedding(config, ctx, stage.tied_stages)) if needed else None
        known = self.embedding or embedding
        tied_weight = known.word_embeddings.weight if config.tied_embeddings and known is not None else None
        self.decoder = TransformerBlock(config, ctx, layers, first=first, final_norm=last, offload=passes.offload)
        self.output_layer = Head(config, ctx, stage.tied_stages, tied_weight) if last else None
        self.mtp = MultiTokenPrediction(config, ctx) if last and config.mtp_depths else None
        self.loss = LOSSES[config.loss_func](config, ctx) if last else None
        sizes = config.padded_vocab_size, config.num_layers, config.hidden_size
        self.chunk_tokens = chunk_size(parallel.loss_chunk_tokens, *sizes)
        if self.output_layer is not None and self.chunk_tokens:
            self.output_layer.backward_reads_parameters = False
        self.loss_watchers: list[Callable[[Tensor, Batch], None]] = []
        """Functions that the last stage calls for each micro-batch. The arguments of a call are the detached losses [s,
        b] and the micro-batch."""

        self._refuse_equal_names()
        if weights.initialize:
            unset = [parameter for parameter in self.parameters() if has_storage(parameter)]
            initialize_parameters_(unset, weights.seed, state.coords, weights.threads)

    def _refuse_equal_names(self) -> None:
        """Raise ValueError if two parameters have the same name."""
        names = [parameter.meta.name for parameter in self.parameters()]  # type: ignore[attr-defined]
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(
                f"parameters {', '.join(twice)}: each name must be unique in the model; use the name that "
                "the module received as a prefix"
            )

    def set_positions(self, config: TransformerConfig) -> None:
        """Replace the model's rotary embeddings with the ones that `config` defines.

        `config` may differ from the model's configuration only in rotary flags and sequence length.
        """
        self.decoder.set_positions(config)
        for module in self.mtp.modules() if self.mtp is not None else ():
            if isinstance(module, TransformerBlock):
                module.set_positions(config)
        self.config = config

    def named_metas(self) -> dict[str, tuple[nn.Parameter, ParamMeta]]:
        """Return a dictionary that maps each parameter's name in the whole model to the pair (parameter, `ParamMeta`),
        for all parameters of this stage."""
        metas = ((parameter, parameter.meta) for parameter in self.parameters())  # type: ignore[attr-defined]
        return {meta.name: (parameter, meta) for parameter, meta in metas}

    def named_layers(self) -> dict[str, nn.Module]:
        """Return a dictionary that maps names in the whole model to this stage's transformer layers and multi-token
        prediction modules.

        The `number` attributes of the multi-token prediction modules continue the layer numbers: the first module has
        the number `config.num_layers`.
        """
        found = {f"decoder.layers.{layer.number}": layer for layer in self.decoder.layers}
        modules = self.mtp.layers if self.mtp is not None else ()
        return found | {f"{MULTI_TOKEN}.{depth}": module for depth, module in enumerate(modules)}

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Return the hidden states for the next stage. On the last stage, return the loss sum instead.

        The loss sum is the scalar sum of loss_mask * loss over tokens, in fp32 (fp64 for fp64 parameters). In training
        mode, backpropagating from the loss sum also computes the gradients of the multi-token prediction losses,
        although the value of the loss sum does not include these losses.
        """
        x = self.hidden_states(hidden, batch)
        if self.output_layer is None:
            return x
        loss, losses = self.loss_sum(x, batch.labels, batch.loss_mask, seed=batch.loss_seed)
        for watch in self.loss_watchers:
            watch(losses, batch)
        if self.mtp is None or not self.training:
            return loss
        assert self.embedding is not None
        further = self.mtp(x, batch, self.embedding, self.loss_sum)
        return loss + (further - further.detach())

    def loss_sum(
        self, x: Tensor, labels: Tensor, mask: Tensor, factor: float = 1.0, seed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the scalar sum of mask * loss, and the detached losses [s, b]. Only the last stage supports this
        method.

        Args:
            x: Hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism.
            labels: Labels [b, s].
            mask: Loss mask [b, s].
            factor: Derivative of the micro-batch's total loss with respect to the loss sum that this method returns.
            seed: Initial gradient of the backward pass (`Batch.loss_seed`). Chunked losses compute their gradients in
                the forward pass and scale them by `factor * seed`. In the backward pass, the gradient of the returned
                sum must therefore equal `factor * seed`.
        """
        head, loss = self.output_layer, self.loss
        assert head is not None and loss is not None, "only the last stage has a loss"
        if not self.chunk_tokens:
            losses = loss(head(x), labels.t())
            return masked_sum(losses, mask), losses.detach()
        tokens = Tokens(labels.t(), mask.t(), factor if seed is None else factor * seed)
        return head(x, partial(loss_sum_in_chunks, Chunking(head, loss, self.chunk_tokens), tokens))

    @torch.no_grad()
    def logits(self, hidden: Tensor | None, batch: Batch, cache: EarlierTokens | None = None) -> Tensor:
        """Return the logits [b, s, vocab_size], gathered from all tensor-parallel ranks and without vocabulary padding.
        Only the last stage supports this method.

        If `cache` is given, the batch's tokens follow the tokens in the cache, and the method adds the batch's tokens
        to the cache.
        """
        return self.whole_logits(self.local_logits(hidden, batch, cache)).transpose(0, 1)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """Gather the logits [s, b, V/tp] of all tensor-parallel ranks, and remove the vocabulary padding. Return the
        logits [s, b, vocab_size]."""
        return all_gather(logits, self.tp, dim=2)[..., : self.config.vocab_size]

    def hidden_states(self, hidden: Tensor | None, batch: Batch, cache: EarlierTokens | None = None) -> Tensor:
        """Return hidden states for the next stage, or for the head on the last stage.

        If `cache` is given, the batch's tokens follow the tokens in the cache, as in `logits`.
        """
        context = BatchContext.of(batch, cache)
        if self.first:
            assert hidden is None and self.embedding is not None, "the first stage reads the batch's tokens"
            hidden = self.embedding(batch.tokens, context)
        assert hidden is not None, "only the first stage takes no hidden states"
        return self.decoder(hidden, context)

    def local_logits(self, hidden: Tensor | None, batch: Batch, cache: EarlierTokens | None = None) -> Tensor:
        """Return the logits [s, b, V/tp] of this rank's shard of the padded vocabulary. Only the last stage supports
        this method."""
        assert self.output_layer is not None, "only the last stage has logits"
        return self.output_layer(self.hidden_states(hidden, batch, cache))


def holds_embedding(config: TransformerConfig, first: bool, last: bool) -> bool:
    """Return True if a stage holds the embedding. The first stage always holds the embedding. With multi-token
    prediction, the last stage also holds the embedding."""
    return first or (last and config.mtp_depths > 0)
