"""Traces of training steps: one file for Perfetto that contains all ranks, with synchronized clocks."""
