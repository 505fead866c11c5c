"""Registration of the callback that keeps the tokenizer's files for inference. The training program has no inference
flags; tools/generate_text.py and tools/serve.py have their own flags. This module does not import torch."""

from __future__ import annotations

from megatron.training.extensions import CALLBACKS

CALLBACKS.register(
    "files of the tokenizer",
    f"{__package__}.kept_files:KeptTokenizer",
    when=lambda config: config.checkpoint.save is not None,
)
