"""Raw text is recognized as such by the names of files. No torch."""

from __future__ import annotations

from megatron.core.dist_checkpointing.path_kind import PATH_KINDS

PATH_KINDS.register("text", f"{__package__}.inputs:is_text", about="is text", order=45)
