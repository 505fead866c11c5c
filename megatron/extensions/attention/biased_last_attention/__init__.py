"""Self-attention whose output projection has a bias in the last layer only, as in GPT-NeoX-Japanese.

The extension is enabled by --attention-module biased_last_attention. The implementation is in
`biased_last_attention.py`.
"""
