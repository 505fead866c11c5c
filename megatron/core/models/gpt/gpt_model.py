"""The GPT model as a pipeline stage. The whole model is the stage with all layers and both ends."""

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
    """False if other weights will be loaded."""

    lazy: bool = False
    """True to leave parameters without memory and values until `DistributedDataParallel` allocates them."""

    threads: int = 1
    """Number of threads that draw initial weights."""

    rules: Sequence[InitRule] = ()
    """Rules that change initial weights (`OptimizerConfig.parameter_rules`)."""


ORDINARY = WeightSetup()


def layer_context(
    config: TransformerConfig,
    parallel: ModelParallelConfig,
    state: ParallelState,
    passes: PassContext,
    weights: WeightSetup,
    hardware: Hardware,
) -> TPContext:
    """Return the context for building every layer of a stage.

    Args:
        config: The model.
        parallel: Parallelism settings.
        state: Process groups.
        passes: State shared by all passes of a rank's stages.
        weights: How parameters are created.
        hardware: The device and its capabilities.
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
    """One pipeline stage, by default the whole model: the embedding on the first stage, layers, final norm and head on
    the last.

    Hidden states are [s, b, w], or [s/tp, b, w] under sequence parallelism, with w the width of the residual stream.
    The first stage receives None instead and reads the batch's tokens. Without process groups (`ParallelState()`) and
    with all layers, the model is an ordinary module.

    With tied embeddings or multi-token prediction the last stage needs the embedding too. If the first and last stage
    are on different ranks, each stage of `Stage.tied_stages` holds a copy. Otherwise the last stage shares the first
    stage's `embedding`.
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
            parallel: Parallelism settings; the default is one process.
            state: Process groups; the default has none.
            stage: The stage; None means the whole model.
            embedding: The first stage's embedding, if the last stage is on the same rank.
            passes: State shared by all stages of a rank.
            weights: How parameters are created.
            hardware: The device and its capabilities.
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
        """Hooks called on the last stage with the detached loss of each token [s, b] and its micro-batch."""

        self._refuse_equal_names()
        if weights.initialize:
            unset = [parameter for parameter in self.parameters() if has_storage(parameter)]
            initialize_parameters_(unset, weights.seed, state.coords, weights.threads)

    def _refuse_equal_names(self) -> None:
        """Raise ValueError if two parameters have the same name."""
        names = [parameter.meta.name for parameter in self.parameters()]  # type: ignore[attr-defined]
        if twice := sorted(name for name, count in Counter(names).items() if count > 1):
            raise ValueError(
                f"parameters {', '.join(twice)}: a name must belong to one parameter of the model; use the name that "
                "the module received as a prefix"
            )

    def set_positions(self, config: TransformerConfig) -> None:
        """Replace the rotary embeddings with those that `config` defines.

        `config` may differ from the model's only in rotary flags and sequence length.
        """
        self.decoder.set_positions(config)
        for module in self.mtp.modules() if self.mtp is not None else ():
            if isinstance(module, TransformerBlock):
                module.set_positions(config)
        self.config = config

    def named_metas(self) -> dict[str, tuple[nn.Parameter, ParamMeta]]:
        """Return this stage's parameters with their tags, keyed by name in the whole model."""
        metas = ((parameter, parameter.meta) for parameter in self.parameters())  # type: ignore[attr-defined]
        return {meta.name: (parameter, meta) for parameter, meta in metas}

    def named_layers(self) -> dict[str, nn.Module]:
        """Return the transformer layers of this stage and its multi-token prediction modules, by name in the whole
        model.

        Their `number`s are consecutive across both.
        """
        found = {f"decoder.layers.{layer.number}": layer for layer in self.decoder.layers}
        modules = self.mtp.layers if self.mtp is not None else ()
        return found | {f"{MULTI_TOKEN}.{depth}": module for depth, module in enumerate(modules)}

    def forward(self, hidden: Tensor | None, batch: Batch) -> Tensor:
        """Return hidden states for the next stage.

        The last stage returns the scalar sum of loss_mask * loss over tokens, in fp32 (fp64 for fp64 parameters). In
        training, the backward pass of this scalar also produces the gradients of multi-token prediction.
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
        """Return (scalar sum of mask * loss, losses [s, b] without gradients) on the last stage.

        Args:
            x: Hidden states [s, b, h], or [s/tp, b, h] under sequence parallelism.
            labels: [b, s].
            mask: [b, s].
            factor: Gradient of the micro-batch loss with respect to the returned sum.
            seed: `Batch.loss_seed`. Chunked losses compute their gradients with `factor * seed`, so the backward must
                arrive with the same product.
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
        """Return gathered logits [b, s, vocab_size] over the true vocabulary, on the last stage.

        With a cache, the batch's tokens follow the cached tokens and are added to the cache.
        """
        return self.whole_logits(self.local_logits(hidden, batch, cache)).transpose(0, 1)

    def whole_logits(self, logits: Tensor) -> Tensor:
        """[s, b, V/tp], padding included -> [s, b, vocab_size]"""
        return all_gather(logits, self.tp, dim=2)[..., : self.config.vocab_size]

    def hidden_states(self, hidden: Tensor | None, batch: Batch, cache: EarlierTokens | None = None) -> Tensor:
        """Return hidden states for the next stage, or for the head on the last stage.

        `cache` is used as in `logits`.
        """
        context = BatchContext.of(batch, cache)
        if self.first:
            assert hidden is None and self.embedding is not None, "the first stage reads the batch's tokens"
            hidden = self.embedding(batch.tokens, context)
        assert hidden is not None, "only the first stage takes no hidden states"
        return self.decoder(hidden, context)

    def local_logits(self, hidden: Tensor | None, batch: Batch, cache: EarlierTokens | None = None) -> Tensor:
        """Return the logits [s, b, V/tp], padding included, on the last stage."""
        assert self.output_layer is not None, "only the last stage has logits"
        return self.output_layer(self.hidden_states(hidden, batch, cache))


def holds_embedding(config: TransformerConfig, first: bool, last: bool) -> bool:
    """Return whether a stage holds the embedding: the first stage does, and with multi-token prediction the last one
    too."""
    return first or (last and config.mtp_depths > 0)
