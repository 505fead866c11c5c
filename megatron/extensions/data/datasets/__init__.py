"""For data sets of one's own: samples from a Python generator (`--dataset-type`), and the writer of indexed datasets.

It has no flags. Read `generator_dataset.py`, which examples/streaming_dataset.py uses, and `indexed_writer.py`.
"""
