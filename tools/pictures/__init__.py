"""Draw runs, layouts and plans with matplotlib. `tools/report.py` combines the pictures on one page."""
