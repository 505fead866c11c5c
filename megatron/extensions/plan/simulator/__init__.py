"""Simulator of pipeline schedules: start and end of each action, bubbles, and peak activations.

The extension has no flags. Plans, traces and `tools/plot_schedule.py` use `simulator.py`.
"""
