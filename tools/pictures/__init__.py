"""Drawings of runs, layouts and plans with matplotlib; `tools/report.py` puts them into one page."""
