"""The formats that checkpoints are converted between. No flags and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.dist_checkpointing.path_kind import OURS
from megatron.core.registry import Registry


@dataclass(frozen=True)
class FormatFacts:
    kinds: tuple[str, ...]
    """Names in `PATH_KINDS` of the paths that have this format."""

    usual: bool = False
    """Whether checkpoints of this program are converted to it where --to says nothing."""


FORMATS: Registry[Any, FormatFacts, ...] = Registry("--to", FormatFacts, attributes=("open", "plan"))
"""Each is a `megatron.extensions.conversion.formats.Format`."""

FORMATS.register("dcp", f"{__package__}.dcp_format:DCP_FORMAT", kinds=OURS)
