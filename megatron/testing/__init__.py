"""Gloo worlds on one machine and comparisons of layouts, for this program's tests and for users' own components."""
