"""Registry of the losses that --loss-func can select. A loss function returns the loss of each token. This module does
not import torch.

@LOSSES.register("focal", multi_token=True)
class Focal(TokenLoss):
    def __call__(self, logits, labels): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from megatron.core.config.flag_spec import Section
from megatron.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

BatchT = TypeVar("BatchT")


@dataclass(frozen=True)
class LossFacts:
    """Properties of a loss."""

    multi_token: bool = False
    """True if the loss supports labels of later tokens (--mtp-num-layers). To support such labels, the loss of a token
    must depend only on the logits and the label of that token."""

    log_likelihood: bool = False
    """True if the loss of a token is the negative log-likelihood of the label, so that evaluations report the
    perplexity exp(mean loss)."""


class Loss(Protocol):
    """Loss function of the last pipeline stage."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each token: logits [s, b, V/tp], labels [s, b] -> losses [s, b]."""


class LossClass(Protocol):
    """Interface of a loss class, such as a subclass of `megatron.core.models.gpt.loss.TokenLoss`."""

    def __call__(self, config: Section, ctx: object) -> Loss:
        """Create the loss. `config` is the `TransformerConfig`, and `ctx` is the
        `megatron.core.tensor_parallel.layers.TPContext`."""

    def prepare(self, config: Section, batch: BatchT) -> BatchT:
        """Return the micro-batch (a `megatron.core.batch.Batch`) with the labels and the loss mask that the loss needs.
        This method must be static."""


LOSSES = Registry("--loss-func", LossFacts, protocol=LossClass)
"""Registry that maps each choice of --loss-func to a `LossClass`."""

LOSSES.register("cross_entropy", "megatron.core.models.gpt.loss:CrossEntropy", multi_token=True, log_likelihood=True)


def has_perplexity(loss_func: str, z_loss_coeff: float) -> bool:
    """Return True if exp(mean loss) is the perplexity. Losses with additional terms, such as a z-loss, do not yield a
    perplexity."""
    return LOSSES.facts(loss_func).log_likelihood and not z_loss_coeff


AUTO = -1
"""Value of the configuration field for --loss-chunk-tokens auto. With `AUTO`, the function `chunk_size` chooses the
size."""

CHUNK_SIZES = 1024, 2048, 4096, 8192
"""Chunk sizes in tokens from which `AUTO` chooses."""

MOST_COST = 0.01
"""Largest fraction of the step time that `AUTO` may spend on chunking."""

WEIGHT_TOKENS = 320
"""Number of tokens at which the matrix products with a weight take as long as reading and writing the weight's gradient
on an H100. The matrix products need 6 FLOPs per weight element and token, at 700 TFLOP/s. Reading and writing the fp32
gradient moves 8 bytes per element, at 2.95 TB/s. The number is computed for an H100, because the other GPUs that the
planner supports have an equal or smaller number."""


def chunk_size(asked: int | None, vocab_size: int, num_layers: int, hidden_size: int) -> int:
    """Return the number of tokens in a chunk, or 0 for all tokens at once.

    Every additional chunk reads and writes the output layer's weight gradient once more. For `AUTO`, the function
    chooses the smallest size for which these reads and writes take at most the fraction `MOST_COST` of the step time.
    If there is no such size, the function returns 0. The output layer's share of the step time is estimated from
    numbers of parameters, assuming 12 h^2 parameters per transformer layer. The chunk size therefore depends only on
    the model, not on the device or the layout."""
    if asked != AUTO:
        return asked or 0
    share = vocab_size / (vocab_size + 12 * num_layers * hidden_size)
    return next((size for size in CHUNK_SIZES if WEIGHT_TOKENS / size * share <= MOST_COST), 0)


def parse_chunk(text: str) -> int:
    """Parse a value of --loss-chunk-tokens. The function raises ValueError if the value is invalid."""
    if text in ("auto", str(AUTO)):  # saved configurations contain AUTO instead of the word "auto"
        return AUTO
    if not text.isdecimal():
        raise ValueError("must be auto or a whole number of at least 0")
    return int(text)
