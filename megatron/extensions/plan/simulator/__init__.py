"""A simulator of pipeline schedules: when each action of a rank runs, bubbles, and activations held at the peak.

It has no flags. Read `simulator.py`; plans, traces and `tools/plot_schedule.py` use it.
"""
