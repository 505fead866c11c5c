"""Triton kernels, each beside a torch twin that gives the same bits in Triton's interpreter, but for the order of sums.
A GPU multiplies and adds in one rounding and has exponentials of its own: its last bits may differ.

A kernel is worth its lines where torch.compile does not make one good kernel of a region (`compiled_regions.py`). For
a subject S, `S.py` holds the twin, the operator `megatron::...` with a fake implementation, and the function that
callers use: it runs the operator on GPUs with Triton and the twin elsewhere. `S_triton.py` holds the kernels; it alone
imports Triton, and is imported when an operator first runs. Fake tensors, plans and profilers see one operator.
"""
