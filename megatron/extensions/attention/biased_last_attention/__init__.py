"""Self-attention whose output projection has a bias in the last layer only, as in GPT-NeoX-Japanese.

Enabled by --attention-module biased_last_attention. Read `biased_last_attention.py`.
"""
