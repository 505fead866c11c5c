"""Tokenizers that read files: SentencePiece models, tokenizer.json, and GPT-2's vocabulary and merges.

Values of `--tokenizer-type`: SentencePieceTokenizer, Llama2Tokenizer, HuggingFaceTokenizer, GPT2BPETokenizer. Read
`sentencepiece.py` and `huggingface.py`. The package that a tokenizer needs is imported when the tokenizer is built.
"""
