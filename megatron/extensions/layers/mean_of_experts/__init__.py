"""Layers that average the outputs of the shared expert and of the chosen experts, as in Command A+. The extension is
enabled by --layer-module mean_of_experts. The implementation is in `layer.py`.
"""
