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
    """Return the `ParamMeta` of the output layer's weight, which is a replica of the word embedding weight in models
    with tied embeddings."""
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
            tied_stages: Stages on different ranks that share the word embeddings.
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

        If the layer has no bias, x is divided by the logit divisor instead of the logits, because x is smaller and the
        result is the same. If `use` is given, the method passes the input of the matrix multiplication to `use`, and
        returns the result of `use` instead of the logits. Hooks that gather the parameters of this module run with and
        without `use`.
        """
        x = x / self.divisor if self.divisor != 1 and self.bias is None else x
        return self.finished(super().forward(x)) if use is None else use(x)

    def finished(self, logits: Tensor) -> Tensor:
        """Divide the logits by the divisor, unless `forward` has already divided x by it, and then apply the soft
        cap."""
        logits = logits / self.divisor if self.divisor != 1 and self.bias is not None else logits
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


class TokenLoss:
    """Base class of loss functions.

    The training loop sums loss_mask * loss over tokens. The loop divides the sum once, by the number of valid tokens in
    the global batch. A loss function must therefore neither average nor mask the losses that it returns.
    """

    must_write = ("__call__",)
    """Methods that every registered loss must override."""

    def __init__(self, config: TransformerConfig, ctx: TPContext) -> None:
        self.config, self.ctx = config, ctx

    @staticmethod
    def prepare(config: TransformerConfig, batch: Batch) -> Batch:
        """Return the micro-batch. If the loss needs other labels or another mask, replace `labels` or `loss_mask`.

        When this method is called, the micro-batch is on the host and contains whole samples, because context
        parallelism has not sharded it yet. Because every rank calls this method, in training and in evaluation, the
        result must depend only on the samples.
        """
        return batch

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token: logits [s, b, V/tp], labels [s, b] -> losses [s, b] in fp32 or fp64. The
        losses must be equal on all tensor-parallel ranks.

        V is `config.padded_vocab_size`. Logits with a vocabulary index of `config.vocab_size` or more are padding.
        `megatron.core.tensor_parallel.cross_entropy.local_columns` returns how many columns of this rank are not
        padding.
        """
        raise NotImplementedError


def masked_sum(losses: Tensor, mask: Tensor) -> Tensor:
    """Return the scalar sum of mask [b, s] * losses [s, b]. Raises ValueError if `losses` is not a tensor [s, b]."""
    return (checked_losses(losses, mask.t().shape) * mask.t().to(losses.dtype)).sum()


def checked_losses(losses: object, shape: torch.Size) -> Tensor:
    """Check and return the result of a loss function. Raises ValueError unless the result is a tensor with one loss per
    token."""
    if not isinstance(losses, Tensor) or losses.shape != shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise ValueError(
            f"--loss-func: the function returned {found}, but must return the loss of each token [s, b], shape "
            f"{tuple(shape)}; do not average or mask it"
        )
    return losses


class CrossEntropy(TokenLoss):
    """Cross-entropy -log softmax(logits)[label], plus the z-loss of --z-loss-coeff."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        config, ctx = self.config, self.ctx
        assert config.vocab_size is not None
        return vocab_parallel_cross_entropy(
            logits, labels, ctx.tp, config.vocab_size, ctx.compiled, config.z_loss_coeff
        )
