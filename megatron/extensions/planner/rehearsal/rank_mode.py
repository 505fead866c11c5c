"""What a rehearsed rank dispatches: its collectives are recorded and answered at once, its memory is counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from megatron.core.config.parallel import ModelParallelConfig
from megatron.extensions.planner.fake_stage import ANSWERS
from megatron.extensions.planner.live_memory import LiveMemory
from megatron.extensions.planner.rehearsal.collective_log import CollectiveLog, call_site, done
from megatron.extensions.planner.rehearsal.record import Holder
from megatron.training import setup

NAMED_BYTES = 2**20
"""Smaller tensors are not counted among the holders of memory."""

HOLDERS = 8


class MemoryWatcher(Protocol):
    """Sees what becomes of storages, by their keys in `RankMode.sizes`."""

    def made(self, key: int, size: int, site: str) -> None: ...

    def gone(self, key: int) -> None: ...

    def resized(self) -> None: ...

    def noted(self, now: int) -> None:
        """So many bytes are held at a moment that counts towards the peak."""


class RankMode(LiveMemory):
    """Answers collectives at once, records them, and counts memory. Raises OutOfMemoryError above `limit` bytes."""

    def __init__(self, log: CollectiveLog, limit: int | None) -> None:
        super().__init__()
        self.log, self.limit, self.peak_phase = log, limit, ""
        self.sites: dict[int, str] = {}
        self.host = 0
        self.watcher: MemoryWatcher | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (answer := ANSWERS.get(func)) is not None:
            return answer(*args, **kwargs)
        if self.log.record(func, args, kwargs):
            return done(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made(self, key: int, size: int) -> None:
        site = ""
        if size >= NAMED_BYTES:
            self.sites[key] = site = call_site()
        if self.watcher is not None:
            self.watcher.made(key, size, site)
        super()._made(key, size)

    def _gone(self, key: int) -> None:
        if self.watcher is not None and key in self.sizes:
            self.watcher.gone(key)
        super()._gone(key)

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if self.watcher is not None:
            self.watcher.resized()
        super()._resized(storage)

    def _note_peak(self) -> None:
        if self._inside:
            return
        if self.watcher is not None:
            self.watcher.noted(self.now)
        self.reach(self.now)

    def reach(self, level: int) -> None:
        """Notes that so many bytes are held. Raises OutOfMemoryError above the limit."""
        if level <= self.peak:
            return
        self.peak, self.peak_phase = level, self.log.phase()[0]
        if self.limit is not None and level > self.limit:
            raise torch.OutOfMemoryError(f"{level:,} bytes are needed, and the device has {self.limit:,}")

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
        real = setup.build_store
        counted: list[list[int]] = []

        def made(config: ModelParallelConfig, device: torch.device | str) -> Any:
            store = real(config, device)
            if store is not None:
                store.pool = type(store.pool)(False)
                counted.append(self.count_apart(store.pool))
            return store

        setup.build_store = made
        try:
            yield
        finally:
            setup.build_store = real
            self.host += sum(map(sum, counted))
