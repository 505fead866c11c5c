"""Callback that sets limits on a run's requests to object storage, and reports the traffic."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict
from math import inf
from pathlib import Path, PurePath

from megatron.extensions.operate.object_storage.block_cache import CACHE, default_folder
from megatron.extensions.operate.object_storage.flags import ObjectStorageFlags
from megatron.extensions.operate.object_storage.limits import LIMITS
from megatron.training.config.run_config import RunConfig
from megatron.training.hooks import Callback
from megatron.training.reliability.run_status import record_event


class StorageTraffic(Callback):
    """Callback that records the event `storage` after each save. The event contains the traffic of rank 0 since the
    start of the run: bytes read and written, number of retries, duration of requests in seconds, and peak memory of
    multipart uploads."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        options = self.config.options(ObjectStorageFlags)
        LIMITS.retry_seconds, LIMITS.timeout_seconds = options.storage_retry_seconds, options.storage_timeout_seconds
        LIMITS.part_bytes = options.storage_part_megabytes << 20
        limit = options.storage_bandwidth_megabytes
        LIMITS.bytes_per_second = inf if limit is None else limit * 1e6
        CACHE.folder = default_folder() if options.storage_cache is None else Path(options.storage_cache)
        CACHE.keeps_checkpoints = options.storage_cache is not None
        CACHE.limit = int(options.storage_cache_gigabytes * 1e9)

    def clean_checkpoints(self, root: PurePath, newest: int, held: Collection[PurePath]) -> None:
        traffic = asdict(LIMITS.traffic)
        traffic["seconds"] = round(traffic["seconds"], 3)
        record_event(self.config.checkpoint.save, "storage", iteration=newest, **traffic)
