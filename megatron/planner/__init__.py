"""Predicts what a layout needs before it runs. No torch."""
