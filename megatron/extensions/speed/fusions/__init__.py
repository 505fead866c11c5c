"""Fused versions of operations that the trunk computes in several steps. Fusions are used with --compile, which is the
default on GPUs.

`--no-fusions` turns the fusions off. `layer.py` and `fused_norm.py` replace entries of the trunk's registries, and
compute the same functions of the same parameters. `split_heads.py` is also used without --compile. `compiled_adam.py`
computes the AdamW update in one kernel, and is used even with --no-fusions. Read `layer.py` first.
"""
