"""Predicts what a layout needs before it runs: parameters, memory, FLOPs."""
