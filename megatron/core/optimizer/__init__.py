"""Optimizers that update flat parameter shards, with learning-rate schedules and loss scaling."""
