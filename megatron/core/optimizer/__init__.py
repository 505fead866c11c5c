"""Optimizers that update flat parameter shards, learning-rate schedules and loss scaling."""
