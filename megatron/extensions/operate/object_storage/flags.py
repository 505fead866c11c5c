"""Object storage flags, and the supported URL schemes. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.dist_checkpointing.file_storage import STORAGES
from megatron.training.config.problem import Problem
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("object storage", may_change=True)
@dataclass(frozen=True)
class ObjectStorageFlags:
    storage_retry_seconds: float = flag(300.0, above=0)
    """Maximum time in seconds for which a failed request to object storage is retried, with increasing delays."""

    storage_timeout_seconds: float = flag(60.0, above=0)
    """Timeout in seconds for requests to object storage."""

    storage_part_megabytes: int = flag(16, at_least=5)
    """Part size of multipart uploads in MiB. A rank keeps up to five parts in memory."""

    storage_bandwidth_megabytes: float | None = flag(None, above=0)
    """Bandwidth limit in MB/s of each rank, for the sum of uploads and downloads."""

    storage_cache: str | None = flag(None, path="local", writes="folder")
    """Folder on the local disk in which all ranks of a host cache data and checkpoints from object storage. Without
    this flag, only data is cached. The default folder is the value of the environment variable MEGATRON_STORAGE_CACHE,
    or a folder for the user in TMPDIR."""

    storage_cache_gigabytes: float = flag(32.0, above=0)
    """Size limit of the --storage-cache folder in GB. Data set indices are not included in the limit."""

    storage_read_ahead_megabytes: int = flag(256, at_least=0)
    """Amount of data in MB that each rank prefetches from object storage. With 0, data is fetched when it is needed."""


def local_rules(config: RunConfig, world_size: int) -> Iterator[Problem]:
    own = config.options(LocalSaveFlags)
    if own.save_local is not None and own.save_local_interval is None and not config.checkpoint.save_interval:
        rule, remedy = "has no interval", "add --save-local-interval, or --save-interval"
        yield Problem("--save-local", own.save_local, rule, remedy)


@extension_flags("local checkpoints", may_change=True, rules=local_rules)
@dataclass(frozen=True)
class LocalSaveFlags:
    save_local: str | None = flag(None, path="local", writes="folder", no_effect_without="--save")
    """Folder on a fast file system that all ranks share. Checkpoints are saved in this folder. The checkpoints of
    --save-interval are uploaded to --save in the background. If --load is the same URL as --save, the newest complete
    checkpoint from either location is loaded."""

    save_local_interval: int | None = flag(None, above=0, no_effect_without="--save-local")
    """Number of iterations between checkpoints in --save-local. Default: --save-interval."""

    save_local_keep: int = flag(2, above=0, no_effect_without="--save-local")
    """Number of newest checkpoints that are kept in --save-local."""


SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "ossfs", "hdfs", "webhdfs", "r2")
"""URL schemes of the fsspec stores that several hosts can share."""


def is_remote(config: RunConfig) -> bool:
    """Return True if a run uses object storage: to save or load checkpoints, or to read data."""
    return any(map(is_url, (config.checkpoint.save, config.checkpoint.load))) or reads_data(config)


def reads_data(config: RunConfig) -> bool:
    """Return True if a run reads data sets from object storage."""
    data = config.data
    words = [*(data.data_path or ()), *(data.train_data_path or ()), *(data.valid_data_path or ())]
    words += [*(data.test_data_path or ()), *(word.partition("=")[2] for word in data.valid or ())]
    return any(map(is_url, words))


def is_url(path: str | None) -> bool:
    """Return True if a path is a URL in object storage. The path may begin with the name of a data set
    reader, as in `datasets:s3://bucket/name`."""
    return path is not None and "://" in path and path.partition("://")[0].rpartition(":")[2] in SCHEMES


for _scheme in SCHEMES:
    STORAGES.register(_scheme, f"{__package__}.attempts:AttemptStorage")

CALLBACKS.register("object storage", f"{__package__}.hooks:StorageTraffic", when=is_remote)
CALLBACKS.register("read-ahead", f"{__package__}.read_ahead:ReadAhead", when=reads_data)
CALLBACKS.register(
    "local checkpoints",
    f"{__package__}.two_tiers:TwoTiers",
    when=lambda config: config.options(LocalSaveFlags).save_local is not None and config.checkpoint.save is not None,
)
