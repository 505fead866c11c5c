"""Losses of tokens: the choices of --loss-func. No torch.

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
    """Facts about a loss."""

    multi_token: bool = False
    """True if it may be called with the labels of a later token (--mtp-num-layers): each loss follows from its logits
    and its label alone."""


class Loss(Protocol):
    """The loss of the last stage of a model."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits [s, b, V/tp], labels [s, b] -> losses [s, b]."""


class LossClass(Protocol):
    """A class of losses, such as those derived from `megatron.core.models.gpt.loss.TokenLoss`."""

    def __call__(self, config: Section, ctx: object) -> Loss:
        """`config` is the `TransformerConfig`, `ctx` the `megatron.core.tensor_parallel.layers.TPContext`."""

    def prepare(self, config: Section, batch: BatchT) -> BatchT:
        """Returns a micro-batch, a `megatron.core.batch.Batch`, whose labels and mask it may have replaced. A static
        method."""


LOSSES = Registry("--loss-func", LossFacts, protocol=LossClass)
"""Name -> `LossClass`."""

LOSSES.register("cross_entropy", "megatron.core.models.gpt.loss:CrossEntropy", multi_token=True)
