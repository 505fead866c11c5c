"""What a rehearsed rank dispatches: its collectives are recorded and answered at once, its memory is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.core.host_to_device import HostPool
from megatron.extensions.planner.as_on_gpus import replaced
from megatron.extensions.planner.fake_stage import ANSWERS
from megatron.extensions.planner.live_memory import LiveMemory
from megatron.extensions.planner.rehearsal.collective_log import CollectiveLog, call_site, done
from megatron.extensions.planner.rehearsal.record import Holder

NAMED_BYTES = 2**20
"""Smaller tensors are not counted among the holders of memory."""

HOLDERS = 8


class RankMode(LiveMemory):
    """Answers collectives at once, records them, and counts memory. Raises OutOfMemoryError above `limit` bytes."""

    def __init__(self, log: CollectiveLog, limit: int | None) -> None:
        super().__init__()
        self.log, self.limit, self.peak_phase = log, limit, ""
        self.sites: dict[int, str] = {}
        self.host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (answer := ANSWERS.get(func)) is not None:
            return answer(*args, **kwargs)
        if self.log.record(func, args, kwargs):
            return done(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made(self, key: int, size: int) -> None:
        if size >= NAMED_BYTES:
            self.sites[key] = call_site()
        super()._made(key, size)

    def _note_peak(self) -> None:
        """Raises OutOfMemoryError above the limit."""
        if self._inside or self.now <= self.peak:
            return
        self.peak, self.peak_phase = self.now, self.log.phase()[0]
        if self.limit is not None and self.now > self.limit:
            raise torch.OutOfMemoryError(f"{self.now:,} bytes are needed, and the device has {self.limit:,}")

    def holders(self) -> tuple[Holder, ...]:
        """The places that hold most now."""
        found: dict[str, list[int]] = {}
        for key, size in self.sizes.items():
            if size >= NAMED_BYTES:
                found.setdefault(self.sites.get(key, ""), []).append(size)
        most = sorted(found.items(), key=lambda item: -sum(item[1]))[:HOLDERS]
        return tuple(Holder(sum(sizes), len(sizes), site) for site, sizes in most)

    @contextmanager
    def host_pools(self) -> Iterator[None]:
        """Counts the buffers of offloaded activations as the host's."""
        real = HostPool.__init__
        counted: list[list[int]] = []

        def made(pool: HostPool, pinned: bool) -> None:
            real(pool, False)
            counted.append(self.count_apart(pool))

        try:
            with replaced((HostPool, "__init__", made)):
                yield
        finally:
            self.host += sum(map(sum, counted))
