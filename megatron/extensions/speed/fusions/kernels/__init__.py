"""Triton kernels, each beside a torch twin that gives the same bits in Triton's interpreter, but for the order of sums.
A GPU multiplies and adds in one rounding and has exponentials of its own: its last bits may differ.

A kernel is worth its lines where torch.compile does not make one good kernel of a region (`compiled_regions.py`). For
a subject S, `S.py` holds the twin, the operator `megatron::...` with a fake implementation, and the function that
callers use: it runs the operator on GPUs with Triton and the twin elsewhere. The modules `..._triton` hold the kernels;
they alone import Triton, and are imported when an operator first runs. An operand that a kernel does without is None,
for which Triton compiles a variant; those that belong together are a tuple.
"""
