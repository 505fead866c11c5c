"""Comparisons with other programs and with published tables; see README.md."""
