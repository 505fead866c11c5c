"""Optimizers over flat shards, their learning-rate schedule and loss scale."""
