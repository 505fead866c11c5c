"""Flags of --dataset-type stream, and registration of the third-party dataset formats that --data-path supports. This
module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.config.flag_spec import flag
from megatron.core.datasets.dataset import DATASETS
from megatron.core.dist_checkpointing.path_kind import PATH_KINDS
from megatron.training.extensions import CALLBACKS, extension_flags


@extension_flags("streams of documents", may_change=True)
@dataclass(frozen=True)
class StreamConfig:
    """Options for documents that are tokenized during training."""

    stream_shuffle_window: int = flag(1024, above=0, no_effect_without="--dataset-type stream")
    """Number of stream documents per shuffle window; the run's seed determines the order within windows. 1 disables
    shuffling."""


_HERE = f"{__package__}.path_kinds"
PATH_KINDS.register("datasets", f"{_HERE}:HUGGING_FACE", about="is a data set of Hugging Face's datasets", order=42)
PATH_KINDS.register("mosaic", f"{_HERE}:MOSAIC", about="is a data set of mosaicml-streaming", order=43)
PATH_KINDS.register("webdataset", f"{_HERE}:WEB_SHARDS", about="is shards of WebDataset", order=44)
DATASETS.register("stream", f"{__package__}.streamed:build_stream")
CALLBACKS.register(
    "place in the stream",
    f"{__package__}.streamed:PlaceInStream",
    when=lambda config: config.data.dataset == "stream",
)
