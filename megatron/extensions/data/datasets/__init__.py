"""Building blocks for custom datasets: samples from a Python generator (`--dataset-type`), and a writer for indexed
datasets.

This extension has no flags. Read `generator_dataset.py`, which examples/streaming_dataset.py demonstrates, and then
`indexed_writer.py`.
"""
