"""Optimizers other than Adam and SGD, learning rate schedules, muP, and averaged weights."""
