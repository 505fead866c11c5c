"""Drawings of runs, layouts and plans as SVG, without any library; `tools/report.py` puts them into one page."""
