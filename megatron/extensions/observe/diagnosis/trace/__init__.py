"""Traces of training steps: all ranks on one clock, in one file that Perfetto opens."""
