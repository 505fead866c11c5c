"""The device that a model runs on, as layers ask about it when they are built and when they run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from megatron.core.attention.backends import ATTENTION_BACKENDS, AttentionBackend, AttentionOperands

T = TypeVar("T")


@dataclass(frozen=True)
class Hardware:
    """Answers for the device that tensors are on. Layers get it in their `TPContext`.

    A plan builds the model with an instance of its own, which answers for a device that is not there.
    """

    compiled: bool = False
    """True if torch.compile compiles element-wise regions (`megatron.core.compiled_regions`)."""

    def host_waits_for(self, x: Tensor) -> bool:
        """Return whether the host waits for the device when it reads `x`."""
        return x.is_cuda

    def attention(self, backend: str, operands: AttentionOperands) -> AttentionBackend:
        """The kernels of --attention-backend for the attention of one layer."""
        made: AttentionBackend = ATTENTION_BACKENDS.build(backend, operands)
        return made

    def each(self, parts: Sequence[T]) -> Iterable[T]:
        """The parts of a loop that makes equal passes over the chunks of a sequence. A plan runs some passes for all,
        so no tensor that a pass makes may outlive the pass."""
        return parts


HARDWARE = Hardware()
"""The default, without compiled regions."""
