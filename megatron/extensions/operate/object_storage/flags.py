"""Flags of object storage, and the schemes of its URLs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.dist_checkpointing.file_storage import STORAGES
from megatron.training.config.run_config import RunConfig
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("object storage", may_change=True)
@dataclass(frozen=True)
class ObjectStorageFlags:
    storage_retry_seconds: float = flag(300.0, above=0)
    """Seconds for which a request to object storage that fails is repeated, with growing pauses."""

    storage_timeout_seconds: float = flag(60.0, above=0)
    """Seconds after which a request to object storage without an answer has failed."""

    storage_part_megabytes: int = flag(16, at_least=5)
    """Size of the parts of an upload in MiB. A rank holds up to five of them in memory."""

    storage_bandwidth_megabytes: float | None = flag(None, above=0)
    """Limit of each rank's uploads and downloads together, in MB/s."""


SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "ossfs", "hdfs", "webhdfs", "r2")
"""Schemes of fsspec's stores that hold files for several hosts."""


def is_remote(config: RunConfig) -> bool:
    """Return whether a run saves to object storage or loads from it."""
    named = (config.checkpoint.save, config.checkpoint.load)
    return any(path is not None and path.partition("://")[0] in SCHEMES for path in named)


for _scheme in SCHEMES:
    STORAGES.register(_scheme, f"{__package__}.fsspec_storage:FsspecStorage")

CALLBACKS.register("object storage", f"{__package__}.hooks:StorageTraffic", when=is_remote)
