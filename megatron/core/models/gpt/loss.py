"""Output layer and loss functions. The output layer maps hidden states to vocabulary-parallel logits, and a loss
function maps logits to the loss of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, overload

import torch
from torch import Tensor, nn

from megatron.core.batch import Batch
from megatron.core.config.model import TransformerConfig
from megatron.core.models.gpt.embedding import word_embedding_meta
from megatron.core.param_meta import ParamMeta
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import OutputLayer, TPContext

T = TypeVar("T")


def output_meta(config: TransformerConfig, tied_stages: tuple[int, ...]) -> ParamMeta:
    """Return the `ParamMeta` of the output layer's weight. In models with tied embeddings, this is the `ParamMeta` of
    the word embedding weight."""
    if config.tied_embeddings:
        return word_embedding_meta(config, tied_stages)
    return ParamMeta("output_layer.weight", (config.padded_vocab_size, config.hidden_size), {"tp": 0}, role="output")


class Head(OutputLayer):
    """Output layer with the model's logit scaling and soft cap."""

    def __init__(
        self, config: TransformerConfig, ctx: TPContext, tied_stages: tuple[int, ...], tied_weight: nn.Parameter | None
    ) -> None:
        """Build the output layer.

        Args:
            config: The model.
            ctx: Tensor-parallel context of the stage.
            tied_stages: Pipeline stages on different ranks that each hold a copy of the word embeddings.
            tied_weight: Word embedding weight of this rank if the output layer uses the same weight; otherwise None.
        """
        bias = ParamMeta("output_layer.bias", (config.padded_vocab_size,), {"tp": 0}, role="bias")
        biases = [bias] if config.add_output_layer_bias else []
        super().__init__(output_meta(config, tied_stages), *biases, ctx=ctx, tied_weight=tied_weight)
        self.divisor, self.cap = config.logits_scaling, config.final_logit_softcapping
        self.backward_reads_parameters = True

    @overload
    def forward(self, x: Tensor) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, use: Callable[[Tensor], T]) -> T: ...

    def forward(self, x: Tensor, use: Callable[[Tensor], T] | None = None) -> Tensor | T:
        """Compute the logits: x [s, b, h], or [s/tp, b, h] under sequence parallelism -> logits [s, b, V/tp].

        Logits are divided by `config.logits_scaling`. If the layer has no bias, the method divides x instead, because x
        is smaller than the logits and the result is the same. If `use` is given, the method does not compute the
        logits: it passes the input of the matrix multiplication to `use`, and returns the result of `use`. The method
        runs inside the module's forward hooks in both cases, so hooks that gather the module's parameters also run if
        `use` is given.
        """
        x = x / self.divisor if self.divisor != 1 and self.bias is None else x
        return self.finished(super().forward(x)) if use is None else use(x)

    def finished(self, logits: Tensor) -> Tensor:
        """Divide the logits by `config.logits_scaling`, unless `forward` has already divided the hidden states. Then
        apply the soft cap."""
        logits = logits / self.divisor if self.divisor != 1 and self.bias is not None else logits
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class TokenLoss:
    """Base class of loss functions.

    The training loop sums loss_mask * loss over the tokens of the global batch, and divides the sum by the number of
    valid tokens. A loss function must therefore neither average nor mask the losses that it returns.
    """

    must_write = ("__call__",)
    """Methods that every registered loss must override."""

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        self.config, self.ctx = config, ctx

    @staticmethod
    def prepare(config: TransformerConfig, batch: Batch) -> Batch:
        """Return the micro-batch from which the loss is computed. A subclass can override this method to replace
        `labels` or `loss_mask`.

        The method is called before the micro-batch is copied to the device and before context parallelism shards it, so
        the micro-batch contains whole samples. Every rank calls the method, in training and in evaluation, so the
        result must depend only on the samples.
        """
        return batch

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token: logits [s, b, V/tp], labels [s, b] -> losses [s, b] in fp32 or fp64. The
        losses must be equal on all tensor-parallel ranks.

        V is `config.padded_vocab_size`. Logits whose vocabulary index is `config.vocab_size` or more are padding.
        `megatron.core.tensor_parallel.cross_entropy.local_columns` returns the number of this rank's columns that are
        not padding.
        """
        raise NotImplementedError


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Multiply the losses [s, b] by the mask [b, s], and return the sum of the products as a scalar tensor. If `losses`
    is not a tensor of shape [s, b], the function raises ValueError."""
    return (checked_losses(losses, mask.t().shape) * mask.t().to(losses.dtype)).sum()


def checked_losses(losses: object, shape: torch.Size) -> Tensor:
    """Check the result of a loss function, and return it unchanged. The function raises ValueError if the result is not
    a tensor with one loss per token."""
    if not isinstance(losses, Tensor) or losses.shape != shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ValueError(
            f"--loss-func: the function returned {found}, but must return the loss of each token [s, b], shape "
            f"{tuple(shape)}; do not average or mask it"
        )
    return losses


class CrossEntropy(TokenLoss):
    """Cross-entropy loss, -log softmax(logits)[label], plus a z-loss with the coefficient --z-loss-coeff."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        config, ctx = self.config, self.ctx
        assert config.vocab_size is not None
        return vocab_parallel_cross_entropy(
            logits, labels, ctx.tp, config.vocab_size, ctx.compiled, config.z_loss_coeff
        )
