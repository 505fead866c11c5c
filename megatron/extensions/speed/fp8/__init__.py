"""fp8 training: scaled casts, scaling recipes, and the GEMMs of linear layers in 8-bit floating point (--fp8-format).

Read `casts.py` first, then `recipes.py`, which defines the GEMMs of a linear layer for each recipe. Models create their
fp8 layers through `build.py`.
"""
