"""Where the tokenizers are. No torch."""

from __future__ import annotations

from megatron.core.parts import TOKENIZERS

_MODEL = ("tokenizer_model",)
TOKENIZERS.register("SentencePieceTokenizer", f"{__package__}.sentencepiece:build_sentencepiece", needs=_MODEL)
TOKENIZERS.register("Llama2Tokenizer", f"{__package__}.sentencepiece:build_llama2", needs=_MODEL)
TOKENIZERS.register(
    "HuggingFaceTokenizer", f"{__package__}.huggingface:build_huggingface", needs=_MODEL, finds_files=True
)
TOKENIZERS.register("GPT2BPETokenizer", f"{__package__}.huggingface:build_gpt2_bpe", needs=("vocab_file", "merge_file"))
