"""Registration of the tokenizers. This module does not import torch."""

from __future__ import annotations

from megatron.core.config.data import TOKENIZERS

_HERE, _MODEL = __package__, ("tokenizer_model",)
TOKENIZERS.register("SentencePieceTokenizer", f"{_HERE}.sentencepiece:SentencePieceTokenizer", needs=_MODEL)
TOKENIZERS.register("Llama2Tokenizer", f"{_HERE}.sentencepiece:Llama2Tokenizer", needs=_MODEL)
TOKENIZERS.register("HuggingFaceTokenizer", f"{_HERE}.huggingface:HuggingFaceTokenizer", needs=_MODEL, finds_files=True)
TOKENIZERS.register("GPT2BPETokenizer", f"{_HERE}.huggingface:GPT2BPETokenizer", needs=("vocab_file", "merge_file"))
