"""Building blocks for custom datasets: a data set that reads samples from a Python generator (`--dataset-type`), and a
writer of indexed datasets.

This extension has no flags. Read `generator_dataset.py`, which examples/streaming_dataset.py demonstrates, and then
`indexed_writer.py`.
"""
