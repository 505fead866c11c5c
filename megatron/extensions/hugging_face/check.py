"""Compares logits of a Hugging Face folder, computed by transformers, with those of our checkpoint, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.batch import Batch
from megatron.core.tokenizers import build_tokenizer
from megatron.extensions.conversion.tokenizer_files import tokenizer_config
from megatron.training.checkpointing import load_whole_model


@dataclass(frozen=True)
class LogitDifference:
    """Largest difference between two models' logits on one text."""

    largest: float
    scale: float
    """Largest absolute logit."""

    tokens: int

    def __str__(self) -> str:
        what = f"largest difference of logits over {self.tokens} tokens"
        return f"{what}: {self.largest:.3g} (largest logit: {self.scale:.3g})"


def compare_logits(hf_folder: Path, checkpoint: Path, text: str) -> LogitDifference:
    """Runs both models on a text, on the CPU in fp32. Both are in memory at once.

    Raises ValueError if transformers is not installed or the text has no tokens.
    """
    require_transformers()
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model, config = load_whole_model(checkpoint, number_format="fp32")
    tokens = _tokens(hf_folder, text, config.model.vocab_size or 0, config.model.max_positions)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(hf_folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        expected = theirs.eval()(tokens).logits
        found = model.logits(None, Batch.of_tokens(tokens))[..., : expected.shape[-1]]
    return LogitDifference(float((found - expected).abs().max()), float(expected.abs().max()), tokens.numel())


def require_transformers() -> None:
    """Raises ValueError if transformers is not installed."""
    if find_spec("transformers") is None:
        raise ValueError("--check needs the package transformers: pip install transformers")


def _tokens(folder: Path, text: str, vocab_size: int, longest: int) -> Tensor:
    """Ids [1, s] of a text; without a tokenizer its bytes, modulo the vocabulary."""
    tokenizer = tokenizer_config(folder)
    if tokenizer.tokenizer_type is None:
        ids = [byte % vocab_size for byte in text.encode()]
    else:
        ids = build_tokenizer(tokenizer).tokenize(text)
    if not ids:
        raise ValueError("--check: the text has no tokens; give a longer one")
    return torch.tensor([ids[:longest]])
