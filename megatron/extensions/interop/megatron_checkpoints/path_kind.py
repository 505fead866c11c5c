"""Entry of `PATH_KINDS` for Megatron-LM checkpoints, which conversions can read and write. This module imports torch
only during a conversion."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from megatron.extensions.interop.megatron_checkpoints.flags import is_megatron

if TYPE_CHECKING:
    from megatron.extensions.interop.conversion.formats import Options, Source, Target


class MegatronCheckpoint:
    """Class in `PATH_KINDS` that recognizes Megatron-LM checkpoints. The class also implements the protocol
    `megatron.extensions.interop.conversion.formats.Format`, so that conversions can read and write these
    checkpoints."""

    format = "megatron"
    usual = False

    def __call__(self, path: str) -> bool:
        return is_megatron(path)

    def open(self, path: PurePath, options: Options) -> Source:
        from megatron.extensions.interop.megatron_checkpoints.megatron_format import MegatronSource

        return MegatronSource(Path(path), options)

    def plan(self, source: Source, folder: Path, options: Options) -> Target:
        from megatron.extensions.interop.megatron_checkpoints.megatron_target import TorchDistTarget

        return TorchDistTarget(source, folder, options)


MEGATRON = MegatronCheckpoint()
