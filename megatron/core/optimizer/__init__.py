"""Optimizers, which update flat parameter shards, as well as learning-rate schedules and loss scaling."""
