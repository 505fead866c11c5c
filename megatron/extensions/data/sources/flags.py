"""The formats of data sets of other libraries, as kinds of paths that --data-path takes. No torch."""

from __future__ import annotations

from megatron.core.dist_checkpointing.path_kind import PATH_KINDS

_HERE = f"{__package__}.path_kinds"
PATH_KINDS.register("datasets", f"{_HERE}:HUGGING_FACE", about="is a data set of Hugging Face's datasets", order=42)
PATH_KINDS.register("mosaic", f"{_HERE}:MOSAIC", about="is a data set of mosaicml-streaming", order=43)
PATH_KINDS.register("webdataset", f"{_HERE}:WEB_SHARDS", about="is shards of WebDataset", order=44)
