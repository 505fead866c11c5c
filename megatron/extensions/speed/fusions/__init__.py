"""Fused versions of operations that the core packages compute in several steps. Fusions are used with --compile, which
is the default on GPUs.

`--no-fusions` turns the fusions off. `layer.py` and `fused_norm.py` replace layers and norms in the registries of the
core packages. The replacements have the same parameters and compute the same results. `split_heads.py` is also used
without --compile. `compiled_adam.py` computes the AdamW update in one kernel, and is used even with --no-fusions. Read
`layer.py` first.
"""
