"""Gloo worlds on one machine and comparisons of layouts, for our tests and for users' own parts."""
