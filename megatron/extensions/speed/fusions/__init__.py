"""Fused forms of what the trunk computes step by step, used with --compile, as on GPUs.

`--no-fusions` turns them off. `layer.py` and `fused_norm.py` are built in place of parts of the trunk's registries, and
compute the same functions of the same parameters; `split_heads.py` is in runs without --compile too.
`compiled_adam.py` is AdamW as one kernel, with --no-fusions too. Read `layer.py` first.
"""
