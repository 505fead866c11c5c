"""Replacements with which a test on CPU detects whether a tensor is used before its copy completes or after its memory
is freed. Copies between device and host complete as late as their events allow, and memory loses its values when it is
freed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from megatron.core.distributed import unit_sharding
from megatron.core.init import alloc_storage
from megatron.extensions.memory.offload import host_update, streamed_units


class LateQueue(host_update.CopyQueue):
    """Queue in which each copy completes as late as its events allow. The copy engine of a GPU may complete copies
    equally late. Until a copy completes, the target tensor of the copy contains wrong values."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.made = 0

    def wait(self, event: LateEvent | None = None) -> None:  # type: ignore[override]
        if event is not None:
            event.synchronize()

    start_after = wait  # type: ignore[assignment]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> LateEvent:  # type: ignore[override]
        target.fill_(255)
        self.waiting.append((source, target))
        return LateEvent(self, self.made + len(self.waiting))

    @contextmanager
    def after_copies(self) -> Iterator[None]:
        self.join()
        yield

    def run_until(self, number: int) -> None:
        while self.waiting and self.made < number:
            source, target = self.waiting.pop(0)
            target.copy_(source)
            self.made += 1

    def join(self) -> None:
        self.run_until(self.made + len(self.waiting))

    synchronize = join


@dataclass
class LateEvent:
    queue: LateQueue
    number: int

    def synchronize(self) -> None:
        self.queue.run_until(self.number)


def lose(tensor: torch.Tensor) -> None:
    """Fill a tensor with NaN instead of freeing its storage: the memory stays allocated, but the values are lost."""
    alloc_storage(tensor)
    tensor.fill_(torch.nan)


@contextmanager
def late_copies() -> Iterator[None]:
    """Within the context, delay copies of offloaded states and weights as long as possible. Overwrite the weights and
    gradients of a sharding unit (such as a layer) whenever its memory would be freed."""
    with ExitStack() as patches:
        for module in (host_update, streamed_units):
            patches.enter_context(mock.patch.object(module, "CopyQueue", LateQueue))
        for module, name in (
            (unit_sharding, "alloc_storage"),
            (unit_sharding, "free_storage"),
            (streamed_units, "alloc_storage"),
        ):
            patches.enter_context(mock.patch.object(module, name, lose))
        yield
