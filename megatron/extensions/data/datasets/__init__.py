"""Building blocks for custom data sets: samples from a Python generator (`--dataset-type`), and the writer of indexed
datasets.

This extension has no flags. Read `generator_dataset.py`, which examples/streaming_dataset.py demonstrates, and then
`indexed_writer.py`.
"""
