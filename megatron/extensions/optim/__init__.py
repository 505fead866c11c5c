"""Optimizers other than Adam and SGD, schedules, muP, and averaged weights."""
