"""Comparisons with other programs and with published tables (README.md)."""
