"""Self-attention whose output projection has a bias in the last layer alone, as in GPT-NeoX-Japanese.

Switched on by --attention-module biased_last_attention. Read `biased_last_attention.py`.
"""
