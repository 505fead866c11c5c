"""A simulator of pipeline schedules: start and end of each action, bubbles, and peak activations.

It has no flags. Read `simulator.py`; plans, traces and `tools/plot_schedule.py` use it.
"""
