"""Traces of training steps: one file for Perfetto with all ranks on one clock."""
