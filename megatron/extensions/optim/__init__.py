"""Optimizers beside Adam and SGD, and averaged weights."""
