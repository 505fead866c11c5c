"""Layers in which the outputs of the shared expert and of the chosen experts are averaged, as in Command A+.

Switched on by --layer-module mean_of_experts. Read `layer.py`.
"""
