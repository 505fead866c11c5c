"""Entry of `PATH_KINDS` for Hugging Face folders. --load accepts these folders, and conversions can read and write
them.

torch is imported only when a folder is opened.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from megatron.core.dist_checkpointing.file_storage import located, storage_of
from megatron.extensions.interop.conversion.stored_input import local_model
from megatron.extensions.interop.hugging_face.flags import CONFIG

if TYPE_CHECKING:
    import torch

    from megatron.core.config.parallel import ModelParallelConfig
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.parallel_state import ParallelState
    from megatron.extensions.interop.conversion.formats import Options, Source, Target
    from megatron.training.checkpoints.checkpointing import Fingerprint, RunCheckpoint
    from megatron.training.config.reading import FlagReader
    from megatron.training.config.run_config import RunConfig
    from megatron.training.progress import Progress


def _has_config(folder: PurePath) -> bool:
    return storage_of(folder).size(folder / CONFIG) is not None and storage_of(folder).finished(folder)


class HuggingFaceFolder:
    """Class in `PATH_KINDS` that recognizes Hugging Face model folders. The class implements the protocols
    `StatesFlags`, `LoadsModels` and `Format`."""

    format = "hf"
    usual = True

    def __call__(self, path: str) -> bool:
        folder = located(path)
        return os.path.isfile(folder / CONFIG) if isinstance(folder, Path) else _has_config(folder)

    def with_flags(self, config: RunConfig, reader: FlagReader) -> RunConfig:
        from megatron.extensions.interop.hugging_face.continued_training.pretrained import with_pretrained_flags

        return with_pretrained_flags(config, reader)

    def start(self, checkpoint: RunCheckpoint, say: Callable[[str], None], data: Fingerprint) -> Progress:
        from megatron.extensions.interop.hugging_face.continued_training.start import load_start

        return load_start(checkpoint, say, data)

    def stages(
        self,
        path: PurePath,
        layout_of: Callable[[RunConfig], ModelParallelConfig],
        state: ParallelState,
        device: torch.device | str,
        number_format: str | None,
    ) -> tuple[dict[int, GPTModel], RunConfig]:
        from megatron.extensions.interop.hugging_face.continued_training.start import load_trained_stages

        return load_trained_stages(local_model(path), layout_of, state, device, number_format)

    def open(self, path: PurePath, options: Options) -> Source:
        from megatron.extensions.interop.hugging_face.hf_format import HFSource

        return HFSource(local_model(path), options)

    def plan(self, source: Source, folder: Path, options: Options) -> Target:
        from megatron.extensions.interop.hugging_face.hf_format import HFTarget

        return HFTarget(source, folder, options)


FOLDER = HuggingFaceFolder()
